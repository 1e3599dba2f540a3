"""The processes in which the tests run: JAX counts its devices once in a process."""

from __future__ import annotations

import warnings

from tests import preloaded
from tests.visible import OF_KERAS, WITH_TENSORFLOW

# Compiling is most of the time that a test takes.
_ENV = OF_KERAS["jax"]

PRELOAD = preloaded.KERAS["jax"]


def strict() -> None:
    import keras

    warnings.simplefilter("error")
    # Keras's own variables warn so when NumPy 2 reads them.
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword", DeprecationWarning)
    # Keras's IoU metrics ask JAX for 64 bits.
    warnings.filterwarnings("ignore", "Explicitly requested dtype int64", UserWarning)
    # References train on one device beside strategies.
    warnings.filterwarnings("ignore", "model '.*' has no strategy", UserWarning)
    keras.utils.disable_interactive_logging()


def one_device() -> None:
    """Plain Keras: what everything is compared with."""
    strict()


def virtual(count: int) -> None:
    import unidist

    unidist.use("sim", devices=count)
    strict()


def joined(count: int) -> None:
    """A process of several, each with `count` devices."""
    import unidist

    unidist.use("jax", devices=count)
    strict()


def environment() -> dict[str, str]:
    return dict(_ENV)


def with_tensorflow() -> dict[str, str]:
    """For tf.data, which the other tests do without (tests/conftest.py)."""
    return {**_ENV, **WITH_TENSORFLOW}

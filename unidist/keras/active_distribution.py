"""Under which distribution models are made, for the engines that leave variables to Keras until then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras import distribution as keras_distribution

from unidist.keras.patching.compat import data_adapters, global_state
from unidist.keras.patching.patches import Hook, calling


@contextlib.contextmanager
def active(distribution: Any) -> Iterator[None]:
    """Makes a distribution (or None) Keras's of this thread, and puts back what was."""
    before = keras_distribution.distribution()
    keras_distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras_distribution.set_distribution(before)


def hooks() -> tuple[Hook, ...]:
    return (
        Hook(data_adapters, "get_data_adapter", _reading_all, "each process reads all batches"),
        Hook(global_state, "clear_session", _clearing, "the strategy in force stays", imported=True),
    )


@calling
def _reading_all(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps Keras's get_data_adapter, so that it sees no distribution: unidist cuts each batch.

    In several processes Keras's own refuses arrays and leaves to each some of the rows of a tf.data.Dataset. From 3.16
    on it leaves some of the batches of any data.
    """
    with active(None):
        return original(*args, **kwargs)


@calling
def _clearing(original: Any, free_memory: bool = True) -> None:
    """Lets go of what Keras noted, but for the strategy in force.

    A model made afterwards in the same scope would train on each device by itself, and nothing would say so.
    """
    distribution = keras_distribution.distribution()
    original(free_memory)
    keras_distribution.set_distribution(distribution)


def all_variables(model: Any) -> list[Any]:
    """A model's variables, those of its metrics and those of its optimizer, each once."""
    found = list(model.variables) + list(getattr(model, "metrics_variables", ()))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        found += optimizer.variables
    return list({id(variable): variable for variable in found}.values())

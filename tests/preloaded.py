"""What the processes of a world find imported: they are forked from one that has (unidist.testing.forkserver).

The programs that `unidist run` starts, and those of the documents, import everything themselves. Horovod is built for
one version of torch and TensorFlow: where it is not installed (ci/fresh.py), or with TESTS_HOROVOD=0, none of it is.
"""

from __future__ import annotations

import importlib.util
import os

_HAS_HOROVOD = os.environ.get("TESTS_HOROVOD") != "0" and importlib.util.find_spec("horovod") is not None


def _there(*names: str) -> tuple[str, ...]:
    return names if _HAS_HOROVOD else tuple(name for name in names if "horovod" not in name)


TORCH = _there(
    "torch.distributed",
    "horovod.torch",
    "unidist.backends.torch.backend",
    "unidist.backends.horovod.backend",
    "unidist.backends.horovod.over_torch",
    "unidist.backends.sim.backend",
    "unidist.testing.laws",
)
JAX = (
    "jax",
    "jax.numpy",
    "tests.support.quick_jax",
    "unidist.backends.jax.backend",
    "unidist.backends.sim.backend",
    "unidist.testing.laws",
)
_TENSORFLOW = _there(
    "tensorflow",
    "tests.support.quick_tensorflow",
    "tensorflow.experimental.dtensor",
    "horovod.tensorflow",
    "unidist.backends.tensorflow.backend",
    "unidist.backends.horovod.backend",
    "unidist.backends.horovod.over_tensorflow",
    "unidist.testing.laws",
)
# With Keras, on the backend that KERAS_BACKEND names, and what the programs of the tests import besides.
_BESIDES = ("keras", "pytest", "h5py")
# Of torch: each process whose steps are programs takes more than a second to import it, even where nothing is compiled.
_COMPILER = ("torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo")
KERAS = {
    "torch": (*TORCH, *_BESIDES, "unidist.keras.torch.hooks", *_COMPILER),
    "jax": (*JAX, *_BESIDES, "tests.support.lasting_losses", "unidist.keras.jax.hooks"),
    "tensorflow": (
        *_TENSORFLOW,
        *_BESIDES,
        *_there("unidist.keras.tensorflow.hooks", "unidist.keras.tensorflow_horovod.hooks"),
    ),
}
# Keras on torch, given tf.data: keras_hub reads text by it.
TORCH_AND_TENSORFLOW = (*KERAS["torch"], "keras_hub", "tensorflow")

"""Names the methods that write a tf.Variable, or the state of a tf.random.Generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from unidist.keras.needs import own_code
from unidist.keras.patching.patches import Hook, every_model

_VARIABLE = "tensorflow.python.ops.resource_variable_ops:ResourceVariable"
_GENERATOR = "tensorflow.python.ops.stateful_random_ops:Generator"
_WRITES = (
    *((_VARIABLE, name) for name in ("assign", "assign_add", "assign_sub", "batch_scatter_update")),
    *((_VARIABLE, f"scatter_{how}") for how in ("add", "sub", "mul", "div", "max", "min", "update")),
    *((_VARIABLE, f"scatter_nd_{how}") for how in ("add", "sub", "max", "min", "update")),
    (_GENERATOR, "skip"),
)


def hooks(make: Callable[[Any], Any], why: str) -> Iterator[Hook]:
    """Yields a hook for each. Keras's own code and unidist's assign alone."""
    for owner, name in _WRITES:
        yield Hook(owner, name, make, why, needed=every_model if name.startswith("assign") else own_code)

"""Random values of a model's variables, for runs of a model whose variables need none."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import keras
import numpy as np

from unidist.keras.patching.compat import is_float_dtype
from unidist.keras.planning.saved_tensors import Saved


class RandomValues(keras.StatelessScope):  # type: ignore[misc]
    """A scope in which every variable reads as random numbers, made when they are first asked for.

    No variable's own value is read or allocated, so models without values work too. Floats are uniform in
    [0.5, 0.9): positive, since a variance may be among them; never 0, which would hide a path; below 1, since an index
    may be among them, as of a kernel that is quantized by groups, and 0 is an index of all.
    """

    def __init__(
        self, values: dict[int, Any], owners: dict[int, int], read: Callable[[int], None], saved: Saved | None
    ) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._saved = saved
        self._random = values
        self._owners = owners
        self._read = read

    def get_current_value(self, variable: Any) -> Any:
        owner = self._owners.get(id(variable))
        if self._saved is not None and self._saved.is_shadow:
            return self._saved.shadow(variable)
        if owner is not None:
            self._read(owner)
        # What layers write during a run stays in this scope and does not reach the next run.
        written = self.state_mapping.get(id(variable))
        if written is not None:
            return written
        if id(variable) not in self._random:
            self._random[id(variable)] = random_value(tuple(variable.shape), variable.dtype)
        # Anew each time: what is made inside a program, as of a recurrent layer's steps, is worth nothing outside.
        value = keras.ops.convert_to_tensor(self._random[id(variable)], variable.dtype)
        return value if self._saved is None else self._saved.weight(value, variable)


def random_value(shape: tuple[int, ...], dtype: str) -> Any:
    """Floats in [0.5, 0.9), zeros of other dtypes; NumPy's."""
    if not is_float_dtype(dtype):
        return np.zeros(shape, dtype)
    return np.random.default_rng(prod(shape)).uniform(0.5, 0.9, shape).astype("float32")

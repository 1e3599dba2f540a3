"""Samples: small random inputs of a model, and random values of its variables."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import keras
import numpy as np

from unidist.errors import LayoutError
from unidist.keras.patching.compat import is_float_dtype, tree
from unidist.keras.planning.saved_tensors import Saved
from unidist.keras.records import model_record


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


ROWS = 2
# Where a model takes no such few: numbers that many divide.
_MORE = (12, 48, 240)
PLACES = 32  # of an image's side that is not fixed


def counts(model: Any, given: Any) -> list[int]:
    """Returns numbers of rows to try in turn, few first.

    Then come as many as the user gave, as the model says, or as it was last given; if nothing of that is known, more.
    """
    described = tree.flatten(given if given is not None else described_by(model))
    fixed = [x.shape[0] for x in described if x is not None and len(x.shape) and x.shape[0] is not None]
    known = fixed[0] if fixed else model_record.of(model).rows
    return list(dict.fromkeys([ROWS, *(_MORE if known is None else (known,))]))


def sample(model: Any, given: Any, rows: int, length: int) -> Any:
    """Inputs of so many rows; dims that the model leaves open are `length`, of images 32.

    Args:
        given: what the user gave: arrays or KerasTensors in the model's own structure, or None.

    Raises:
        LayoutError: the model does not say what it takes.
    """
    if (taken := taken_by(model, given)) is not None:
        return tree.map_structure(
            lambda x: _one(x, rows, length) if isinstance(x, keras.KerasTensor) else _cut(x, rows), taken
        )
    raise LayoutError(
        f"model {model.name!r} does not say what it takes: give plan(model, mesh, inputs=...) a batch, or "
        "KerasTensors, as it is called with; then ModelParallel(mesh, that_plan.layout_map)"
    )


def parts(model: Any) -> list[Any]:
    """Returns the outermost models that say what they take.

    They are the model, or those inside of one that does not say, as of a GAN.
    """
    says = described_by(model) is not None or _built_for(model) is not None
    if says and model.built and isinstance(model, keras.Model):
        return [model]
    found = {id(part): part for layer in model._layers for part in parts(layer)}
    return list(found.values())


def _built_for(model: Any) -> Any:
    shapes = getattr(model, "_build_shapes_dict", None)
    return next(iter(shapes.values())) if shapes and len(shapes) == 1 else None


def described_by(model: Any) -> Any:
    """Returns what a model says that it takes; None where it does not. Sequential holds its graph inside."""
    return getattr(getattr(model, "_functional", None) or model, "_inputs_struct", None)


def taken_by(model: Any, given: Any) -> Any:
    """Returns what the user gave, or else KerasTensors as the model says; None where it does not."""
    if given is not None or (given := described_by(model)) is not None:
        return given
    shapes = _built_for(model)
    return None if shapes is None else tree.map_shape_structure(keras.KerasTensor, shapes)


def is_open(model: Any, given: Any) -> bool:
    """Returns whether a model's inputs leave a dim behind the batch open.

    Then a sequence may have another length.
    """
    taken = tree.flatten(taken_by(model, given))
    return any(isinstance(x, keras.KerasTensor) and None in x.shape[1:] and len(x.shape) < 4 for x in taken)


def _one(x: Any, rows: int, length: int) -> Any:
    fill = PLACES if len(x.shape) > 3 else length
    shape = tuple(fill if n is None else n for n in x.shape[1:])
    rng = np.random.default_rng(len(shape))
    name = (x.name or "").lower()
    if "mask" in name:
        mask = np.ones((rows, *shape), "float32")
        # Some places are hidden, as in a batch of sentences of several lengths.
        mask[-1, -1:] = 0
        return keras.ops.convert_to_tensor(mask, x.dtype)
    if is_float_dtype(x.dtype):
        return keras.ops.convert_to_tensor(rng.normal(size=(rows, *shape)).astype("float32"), x.dtype)
    return keras.ops.convert_to_tensor(rng.integers(0, 2, (rows, *shape)), x.dtype)


def _cut(x: Any, rows: int) -> Any:
    return keras.ops.convert_to_tensor(x[:rows])

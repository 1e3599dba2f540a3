"""Values between the host and DTensor: packed onto layouts, gathered back; and the variables."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist.backends.protocol import Array
from unidist.errors import CapabilityError
from unidist.keras.lazy_values import Stored
from unidist.keras.patching.compat import in_stateless_scope
from unidist.keras.patching.patches import calling
from unidist.keras.tensorflow import worlds

U = dtensor.UNSHARDED
# The mesh on which this thread computes; None outside of steps and of calls of models.
computing: ContextVar[dtensor.Mesh | None] = ContextVar("unidist_dtensor_mesh", default=None)


def replicated(mesh: dtensor.Mesh, ndim: int) -> dtensor.Layout:
    return dtensor.Layout([U] * ndim, mesh)


def put(value: Any, layout: dtensor.Layout) -> Any:
    """A DTensor from the same full value on every process. Its dims must divide."""
    whole = np.asarray(value)
    return put_parts(whole.shape, layout, lambda index: tf.constant(whole[index]))


def put_parts(shape: Sequence[int], layout: dtensor.Layout, part: Callable[[tuple[slice, ...]], Any]) -> Any:
    """A DTensor of what `part` gives of the full value for each device of this process."""
    parts = []
    for place in layout.mesh.local_device_locations():
        slices = []
        for size, axis in zip(shape, layout.sharding_specs, strict=True):
            if axis == U:
                slices.append(slice(None))
                continue
            step = size // layout.mesh.dim_size(axis)
            slices.append(slice(place[axis] * step, (place[axis] + 1) * step))
        parts.append(part(tuple(slices)))
    return dtensor.pack(parts, layout)


def is_spread(x: Any) -> bool:
    """Returns whether x is a DTensor outside of tf.function."""
    return isinstance(x, tf.Tensor) and not tf.is_symbolic_tensor(x) and dtensor.is_dtensor(x)


def on_host(x: Any) -> Any:
    """The whole value as a plain tensor, whose gradient is spread again. A collective where x is sharded."""
    if not is_spread(x):
        return x

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def gather(value: Any) -> tuple[Any, Any]:
        layout = dtensor.fetch_layout(value)
        whole = value
        if not layout.is_fully_replicated():
            with worlds.together(f"reading a value of {value.dtype.name}{value.shape.as_list()}"):
                whole = dtensor.relayout(value, replicated(layout.mesh, len(value.shape)))

        def spread(gradient: Any) -> Any:
            if tf.is_symbolic_tensor(gradient):
                raise CapabilityError(
                    "a gradient through a model over DTensor is traced, as tape.jacobian and batch_jacobian do: give "
                    "them experimental_use_pfor=False, or call tape.gradient for each output"
                )
            return put(gradient, layout)

        return tf.identity(dtensor.unpack(whole)[0]), spread

    return gather(x)


def whole(x: Any) -> Array:
    """The full value of a tensor or variable as NumPy. A collective where it is sharded."""
    value = x.read_value() if isinstance(x, tf.Variable) else x
    return np.asarray(on_host(value).numpy())


class SpreadVariable(dtensor.DVariable):  # type: ignore[misc, unused-ignore]
    """A DVariable that takes and gives whole values on the host, outside of what computes on its mesh.

    Attributes:
        compute: how it is laid out where layers read it; None: as it rests.
        state: of its gradient and its slots, and of itself while the optimizer updates it; None: as it rests.
        held: the whole value, while a model is being saved by a process that must not ask the others.
        waits_on: the distribution that it is cut by, until its model is placed; None: it is placed.
    """

    compute: dtensor.Layout | None = None
    state: dtensor.Layout | None = None
    held: Array | None = None
    waits_on: Any = None

    def numpy(self) -> Array:
        return whole(self) if self.held is None else self.held

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype=dtype)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign(self._as_stored(value), *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign_add(self._as_stored(delta), *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign_sub(self._as_stored(delta), *args, **kwargs)

    def scatter_sub(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        """DTensor has no scatter into variables: the gradient is made dense."""
        return self.assign_sub(tf.convert_to_tensor(sparse_delta))

    def scatter_add(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        return self.assign_add(tf.convert_to_tensor(sparse_delta))

    def assign_stored(self, value: Stored, convert: Callable[..., Any]) -> None:
        """Takes what is in a file. Each device's part of it is read."""
        dtype = self.dtype.name
        found = put_parts(value.shape, self.layout, lambda index: convert(value.part(index), dtype=dtype))
        super().assign(found)

    def value(self) -> Any:
        if self.is_read_on_host():
            return on_host(super().value())
        found, wanted = super().value(), self._wanted()
        return found if wanted is None else _read_as(found, wanted, self.layout)

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
        return (
            super()._dense_var_to_tensor(dtype, name, as_ref)
            if self._wanted() is None and not self.is_read_on_host()
            else self.value()
        )

    def is_read_on_host(self) -> bool:
        """DTensor computes nothing of a value on a mesh and one on the host."""
        is_computing = computing.get() is not None or _reading.for_update
        return tf.executing_eagerly() and (self.waits_on is not None or not is_computing)

    def _wanted(self) -> dtensor.Layout | None:
        wanted = self.state if _reading.for_update else self.compute
        return None if wanted is None or wanted == self.layout else wanted

    def _as_stored(self, value: Any) -> Any:
        """Brings what was computed in another layout to that in which the variable rests."""
        if tf.executing_eagerly() and not is_spread(value):
            return put(np.asarray(value), self.layout)
        if self.state is None or self.state == self.layout:
            return value
        return dtensor.relayout(tf.convert_to_tensor(value), self.layout)


def _read_as(value: Any, wanted: dtensor.Layout, stored: dtensor.Layout) -> Any:
    """The value in another layout, whose gradient is whole in that layout first."""

    def back(gradient: Any) -> Any:
        return gradient if isinstance(gradient, tf.IndexedSlices) else reduced(gradient, wanted, stored)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def read(found: Any) -> tuple[Any, Any]:
        return dtensor.relayout(found, wanted), back

    return read(value)


def reduced(gradient: Any, computed: dtensor.Layout, state: dtensor.Layout) -> Any:
    """A gradient in the layout of its variable's state, by way of that in which layers read the variable.

    In one step DTensor (TensorFlow 2.21) lets the data axes on the gradient's dims spread to the products before it,
    whose rows are cut over these axes, and cannot partition them then.
    """
    whole = dtensor.relayout(tf.convert_to_tensor(gradient), computed)
    return whole if computed == state else dtensor.relayout(whole, state)


def rows_by_id(gradient: tf.IndexedSlices, variable: SpreadVariable) -> tf.IndexedSlices:
    """Returns the gradient of a lookup, not summed by its ids, on every device.

    Keras's optimizers on TensorFlow treat the rows of an id that occurs several times one by one. The square of such a
    gradient is the sum of their squares.

    Ids are of 32 bits where they suffice, as DTensor's own: its compiler ends the process where it adds up rows by ids
    of 64 bits that it knows.
    """
    mesh = variable.layout.mesh
    rows = dtensor.relayout(gradient.values, replicated(mesh, gradient.values.shape.rank))
    is_short = gradient.indices.dtype == tf.int64 and variable.shape[0] < 2**31
    named = tf.cast(gradient.indices, tf.int32) if is_short else gradient.indices
    ids = dtensor.relayout(named, replicated(mesh, 1))
    return tf.IndexedSlices(rows, ids, tf.constant(variable.shape.as_list(), ids.dtype))


@calling
def beside_rows(original: Any, x1: Any, x2: Any) -> Any:
    """Wraps Keras's product or division, so that a dense value beside rows by their ids is gathered.

    It takes rows of that by the ids, and the division looks for zeros in it: of shards DTensor cannot.
    """
    mesh = computing.get()
    given = [x for x in (x1, x2) if isinstance(x, tf.IndexedSlices)]
    if mesh is None or len(given) != 1:
        return original(x1, x2)
    found = original(*(x if x is given[0] else _whole_here(x, mesh) for x in (x1, x2)))
    # A division leaves the number of rows open, and DTensor cannot cut what it does not know.
    rows, ids = _whole_here(found.values, mesh), _whole_here(found.indices, mesh)
    return tf.IndexedSlices(rows, ids, given[0].dense_shape)


def _whole_here(x: Any, mesh: dtensor.Mesh) -> Any:
    rank = getattr(getattr(x, "shape", None), "rank", None)
    return dtensor.relayout(tf.convert_to_tensor(x), replicated(mesh, rank)) if rank else x


class _Reading(threading.local):
    for_update = False


_reading = _Reading()


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Inside, an optimizer runs: variables are read in the layouts of their states."""
    before, _reading.for_update = _reading.for_update, True
    try:
        yield
    finally:
        _reading.for_update = before


# What a variable of Keras's has of them: TensorFlow would read the part of this process in C++, asking nobody.
BETWEEN = (
    *("__lt__", "__le__", "__gt__", "__ge__"),
    *(
        f"__{side}{name}__"
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
        for side in ("", "r")
    ),
)
OPERATORS = ("__neg__", "__pos__", "__abs__", "__invert__", "__round__", "__getitem__", "__eq__", "__ne__", *BETWEEN)


@calling
def operating(original: Any, variable: Any, *others: Any) -> Any:
    """An operator of a variable: outside of what computes on the mesh the variable is read on the host."""
    value = variable._value
    if in_stateless_scope() or not isinstance(value, SpreadVariable) or not value.is_read_on_host():
        return original(variable, *others)
    return original(SimpleNamespace(value=variable._maybe_autocast(value.value())), *others)


def _beside_another(name: str) -> Any:
    """Wraps an operator of TensorFlow's variables, of two on a mesh: the other is read where this one is."""
    original = getattr(dtensor.DVariable, name)

    @functools.wraps(original)
    def operator(variable: Any, other: Any, *args: Any) -> Any:
        return original(variable, other.value() if isinstance(other, SpreadVariable) else other, *args)

    return operator


for _name in BETWEEN:
    setattr(SpreadVariable, _name, _beside_another(_name))


@calling
def scattering(original: Any, indices: Any, values: Any, shape: Any) -> Any:
    """Wraps Keras's scatter, of whole values, with indices of 32 bits where they suffice.

    DTensor's own are such, and it refuses a mix.
    """
    mesh, known = computing.get(), tf.get_static_value(shape)
    indices = tf.convert_to_tensor(indices)
    if indices.dtype == tf.int64 and known is not None and max(known, default=0) < 2**31:
        indices, shape = tf.cast(indices, tf.int32), [int(size) for size in known]
    if mesh is None:
        return original(indices, values, shape)
    return _whole_here(original(_whole_here(indices, mesh), _whole_here(values, mesh), shape), mesh)

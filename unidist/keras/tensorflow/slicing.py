"""Makes slices and losses that mix rows ready for DTensor: works on whole values instead of shards.

TensorFlow 2.21 reads beyond an array, and mostly crashes, where DTensor partitions a slice with new axes
(`x[:, None]`); it reverses the shards of `x[::-1]` each for itself; and it cannot take one of the rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.experimental import dtensor

from unidist.errors import CapabilityError
from unidist.keras import joined_rows
from unidist.keras.layer_facts import is_of_keras
from unidist.keras.patching.compat import Trainer
from unidist.keras.patching.patches import calling
from unidist.keras.tensorflow import values

_mesh = values.computing


@contextlib.contextmanager
def on(mesh: dtensor.Mesh) -> Iterator[None]:
    """Computes on a mesh: DTensor's own default, and where slices and losses are made ready for it."""
    token = _mesh.set(mesh)
    try:
        with dtensor.default_mesh(mesh):
            yield
    finally:
        _mesh.reset(token)


@calling
def capturing(original: Any, self: Any, graph: Any, tensor: Any, name: Any = None) -> Any:
    """Wraps how a program takes a tensor from outside: one that is on no mesh becomes a constant of it."""
    is_outside = isinstance(tensor, tf.__internal__.EagerTensor) and tensor.dtype not in (tf.resource, tf.variant)
    if _mesh.get() is None or not is_outside:
        return original(self, graph, tensor, name)
    with tf.init_scope():
        known = None if values.is_spread(tensor) else tensor.numpy()
    return original(self, graph, tensor, name) if known is None else tf.constant(known)


def mesh_here() -> dtensor.Mesh | None:
    """The mesh on which this thread computes."""
    return _mesh.get()


def whole(x: Any, mesh: dtensor.Mesh) -> Any:
    """A tensor of the computation, with its mask, gathered onto every device; its gradient is cut again."""
    if not isinstance(x, tf.Tensor) or x.shape.rank in (None, 0):
        return x
    return joined_rows.moved(x, lambda part: dtensor.relayout(part, values.replicated(mesh, part.shape.rank)))


def adopt_loss(model: Any) -> None:
    """A loss that the model computes itself may mix rows: it is given whole batches."""
    if type(model).compute_loss is Trainer.compute_loss or "compute_loss" in vars(model):
        return
    original = model.compute_loss

    @functools.wraps(original)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        mesh = _mesh.get()
        if mesh is not None:
            args, kwargs = tree.map_structure(lambda x: whole(x, mesh), (args, kwargs))
        return original(*args, **kwargs)

    object.__setattr__(model, "compute_loss", compute_loss)


@calling
def losing(original: Any, self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Wraps Loss.__call__: a loss of the user's own may mix rows too."""
    mesh, given = _mesh.get(), (y_true, y_pred, sample_weight)
    if mesh is not None and not is_of_keras(getattr(self, "fn", type(self))):
        given = tree.map_structure(lambda x: whole(x, mesh), given)
    return original(self, *given)


@dataclass(frozen=True)
class _Spec:
    """Holds what tf.strided_slice is asked for; bit k of a mask is about entry k.

    Attributes:
        begin, end, strides: sequences of one length, of numbers or scalar tensors.
    """

    begin: list[Any]
    end: list[Any]
    strides: list[Any]
    begin_mask: int
    end_mask: int
    ellipsis_mask: int
    new_axis_mask: int
    shrink_axis_mask: int

    def has(self, mask: str, entry: int) -> bool:
        found: int = getattr(self, mask)
        return bool(found >> entry & 1)

    @property
    def entries(self) -> range:
        return range(len(self.begin))

    def is_new(self, entry: int) -> bool:
        """An entry cannot be both: the ellipsis, then the new axis, comes before what else its bits say."""
        return self.has("new_axis_mask", entry) and not self.has("ellipsis_mask", entry)

    def new_axes(self, ndim: int) -> list[int]:
        """The places of the new dims in the result, ascending, of a slice of a tensor of `ndim` dims."""
        used = sum(not self.is_new(k) and not self.has("ellipsis_mask", k) for k in self.entries)
        places, place = [], 0
        for k in self.entries:
            if self.has("ellipsis_mask", k):
                place += ndim - used
            elif self.is_new(k):
                places.append(place)
                place += 1
            else:
                place += not self.has("shrink_axis_mask", k)
        return places

    def without_new_axes(self) -> _Spec:
        kept = [k for k in self.entries if not self.is_new(k)]

        def mask(name: str) -> int:
            return sum(1 << place for place, k in enumerate(kept) if self.has(name, k))

        return _Spec(
            [self.begin[k] for k in kept],
            [self.end[k] for k in kept],
            [self.strides[k] for k in kept],
            mask("begin_mask"),
            mask("end_mask"),
            mask("ellipsis_mask"),
            0,
            mask("shrink_axis_mask"),
        )

    def needs_whole(self) -> bool:
        """Returns whether it takes one row, or steps over elements: DTensor would do that in each shard."""
        steps = [_number(stride) for k, stride in enumerate(self.strides) if not self.has("ellipsis_mask", k)]
        takes_a_row = self.has("shrink_axis_mask", 0) and not self.has("ellipsis_mask", 0)
        return takes_a_row or any(step != 1 for step in steps)


@calling
def slicing(original: Any, input_: Any, begin: Any, end: Any, strides: Any = None, *args: Any, **options: Any) -> Any:
    """Wraps tf.strided_slice, by which a tensor is indexed.

    On a mesh it works on whole values where shards will not do. New axes are added afterwards.

    Raises:
        CapabilityError: how much is taken is known in the step alone: DTensor takes something else.
    """
    mesh = _mesh.get()
    if mesh is None or args or not isinstance(input_, tf.Tensor) or input_.shape.rank is None:
        return original(input_, begin, end, strides, *args, **options)
    asked = _spec(begin, end, strides, options)
    core = asked.without_new_axes()
    x = whole(input_, mesh) if core.needs_whole() and not _is_known(input_) else input_
    if core.begin:
        x = original(
            x,
            tf.stack(core.begin),
            tf.stack(core.end),
            tf.stack(core.strides),
            begin_mask=core.begin_mask,
            end_mask=core.end_mask,
            ellipsis_mask=core.ellipsis_mask,
            shrink_axis_mask=core.shrink_axis_mask,
            name=options.get("name"),
        )
        if input_.shape.is_fully_defined() and not x.shape.is_fully_defined():
            raise CapabilityError(
                "a slice between numbers that a step computes, as RandomCrop's: DTensor must know its size before. Do "
                "it in the data, by dataset.map, or use torch or jax"
            )
    for place in asked.new_axes(input_.shape.rank):
        x = tf.expand_dims(x, place)
    return x


@calling
def selecting(original: Any, condition: Any, t: Any, e: Any, name: Any = None) -> Any:
    """Wraps the operation of tf.where with two values, and spreads a single condition on a mesh.

    DTensor crashes the process where it has no dims and what it chooses from has some.
    """
    if _mesh.get() is None:
        return original(condition, t, e, name=name)
    chosen = [x.shape if isinstance(x, tf.Tensor) else tf.TensorShape(np.shape(x)) for x in (t, e)]
    shape = tf.broadcast_static_shape(*chosen) if all(one.rank is not None for one in chosen) else None
    condition = tf.convert_to_tensor(condition)
    if condition.shape.rank == 0 and shape is not None and shape.rank and shape.is_fully_defined():
        condition = tf.broadcast_to(condition, shape)
    return original(condition, t, e, name=name)


@calling
def scattering(original: Any, indices: Any, updates: Any, shape: Any, *args: Any, **options: Any) -> Any:
    """Wraps tf.scatter_nd, which gradients of top_k and of sorting call: of whole values on a mesh.

    DTensor lets each device place the rows of all into its own part.
    """
    mesh = _mesh.get()
    if mesh is None:
        return original(indices, updates, shape, *args, **options)
    return whole(original(whole(indices, mesh), whole(updates, mesh), shape, *args, **options), mesh)


def _spec(begin: Any, end: Any, strides: Any, options: dict[str, Any]) -> _Spec:
    first = _scalars(begin)
    masks = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    return _Spec(
        first,
        _scalars(end),
        [1] * len(first) if strides is None else _scalars(strides),
        *(options.get(name, 0) for name in masks),
    )


def _scalars(packed: Any) -> list[Any]:
    known = tf.get_static_value(packed) if isinstance(packed, tf.Tensor) else packed
    if known is None:
        return list(tf.unstack(packed))
    kind = packed.dtype.as_numpy_dtype if isinstance(packed, tf.Tensor) else None
    return list(np.asarray(known, kind))


def _is_known(x: Any) -> bool:
    """Returns whether a tensor is the same on all devices without being gathered, as shapes are."""
    return tf.get_static_value(x) is not None if tf.is_symbolic_tensor(x) else not values.is_spread(x)


def _number(x: Any) -> int | None:
    """None where it is not known before the step runs."""
    return None if isinstance(x, tf.Tensor) else int(x)

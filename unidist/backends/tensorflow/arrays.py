"""The data of a Sharding in TensorFlow: one DTensor of shape [*mesh.shape, *largest part].

Its first dims are sharded over the mesh's axes, one each, so that every device holds what its rank holds under the
sharding: a shard, a contribution (P) or a replica. DTensor itself has no partial axes, no several axes on one dim and
no uneven dims. A part that is smaller than the largest is padded at its end; what the padding holds is unspecified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist import events
from unidist.algebra import Sharding
from unidist.backends.protocol import plain_array

Shape = tuple[int, ...]


@lru_cache(maxsize=16384)
def largest(sharding: Sharding) -> Shape:
    """The shape of the largest part. The first place of all axes holds it."""
    mesh = sharding.mesh
    return sharding.local_shape(mesh.rank_at(dict.fromkeys(mesh.axis_names, 0)))


@lru_cache(maxsize=16384)
def data_shape(sharding: Sharding) -> Shape:
    """The shape of the DTensor."""
    return sharding.mesh.shape + largest(sharding)


def stacked_layout(mesh: dtensor.Mesh, ndim: int) -> dtensor.Layout:
    """DTensor's layout of data whose parts have `ndim` dims."""
    return dtensor.Layout([*mesh.dim_names, *[dtensor.UNSHARDED] * ndim], mesh)


def known(value: Any) -> Any:
    """A tensor as it is, else TensorFlow's of the value: Python's numbers get its default dtypes."""
    if isinstance(value, tf.Tensor | tf.Variable):
        return tf.convert_to_tensor(value)
    array = plain_array(value)
    return tf.convert_to_tensor(array if hasattr(value, "dtype") else value)


def pack(parts: Mapping[int, Any], sharding: Sharding, mesh: dtensor.Mesh, ranks: tuple[int, ...]) -> Any:
    """Data of the parts of this process's ranks; `ranks` are in the order of the mesh's local devices."""
    shape, ones = largest(sharding), (1,) * len(sharding.mesh.shape)
    held = [tf.reshape(padded(parts[rank], shape), ones + shape) for rank in ranks]
    return dtensor.pack(held, stacked_layout(mesh, len(shape)))


def unpack(x: Any, sharding: Sharding, ranks: tuple[int, ...]) -> dict[int, Any]:
    """rank -> its part, without padding, for this process's ranks."""
    shape = largest(sharding)
    return {
        rank: cut(tf.reshape(part, shape), sharding.local_shape(rank))
        for rank, part in zip(ranks, dtensor.unpack(x), strict=True)
    }


def padded(part: Any, shape: Shape) -> Any:
    """The part with zeros at its end, up to a shape."""
    if tuple(part.shape) == shape:
        return part
    return tf.pad(part, [(0, most - n) for n, most in zip(part.shape, shape, strict=True)])


def cut(part: Any, shape: Shape) -> Any:
    """The first elements along every dim, down to a shape."""
    return part if tuple(part.shape) == shape else part[tuple(slice(n) for n in shape)]


def differentiable(
    x: Any, forward: Callable[[Any], Any], backward: Callable[[Any], Any], check: Callable[[], object]
) -> Any:
    """Returns forward(x), whose gradient is backward(gradient), and so on in turns.

    `check` raises where it has none.

    The gradient's collectives are for what the forward ones were for.
    """
    purpose = events.purpose()

    def grad(upstream: Any) -> Any:
        check()
        with events.for_purpose(purpose):
            return _linear(backward, forward)(upstream)

    return tf.custom_gradient(lambda value: (forward(value), grad))(x)


def _linear(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def both(value: Any) -> tuple[Any, Callable[[Any], Any]]:
        return forward(value), _linear(backward, forward)

    found: Callable[[Any], Any] = tf.custom_gradient(both)
    return found

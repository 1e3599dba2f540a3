"""Takes a variable from where it rests to the data shards, and its gradient back, by collectives.

On global arrays "fanned out over the data axes" is a stack: one copy for each data shard, each shard holding its own,
whose gradients are the shards' own sums. Autodiff adds the gradients of several uses there, where adding moves nothing,
and one reduce_scatter takes them to where the optimizer works. Inside a region (regions.py), where the program is that
of one data shard, it is an all_gather whose adjoint is that reduce_scatter.

What layers read in low precision is gathered in it: `param_dtype` of PyTorch FSDP (Zhao et al., arXiv:2304.11277).

Source: ZeRO (Rajbhandari et al., SC 2020, arXiv:1910.02054). Bytes a rank, of a variable of P bytes over n data shards:
reduce_scatter (n-1)/n P, all_gather (n-1)/n P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from unidist.algebra import Axes
from unidist.keras.jax.layouts import Placement, of_native, places


@dataclass(frozen=True)
class Cut:
    """Says how the data axes cut one variable's gradient and slots.

    Attributes:
        mesh: JAX's mesh.
        axes: the data axes that cut it, major to minor.
        rows: all data axes. Those that do not cut it hold replicas, whose gradients are added.
        dim: which dim they cut.
        outer: into how many parts other axes cut that dim before; its parts are then laid side by side, as a dim of
            their own before it.
        stored: whether the value rests so too.
    """

    mesh: Mesh
    axes: Axes
    rows: Axes
    dim: int
    outer: int
    stored: bool

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the value with the parts of `outer` laid side by side."""
        return PartitionSpec(*[None] * self.side, self.axes)

    @property
    def side(self) -> int:
        """The dim that the data axes cut then."""
        return self.dim + (self.outer > 1)

    def laid(self, value: Any) -> Any:
        if self.outer == 1:
            return value
        shape = value.shape
        parts = (self.outer, shape[self.dim] // self.outer)
        return value.reshape(*shape[: self.dim], *parts, *shape[self.dim + 1 :])

    def joined(self, value: Any) -> Any:
        """Joins what `laid` took apart."""
        if self.outer == 1:
            return value
        shape = value.shape
        return value.reshape(*shape[: self.dim], shape[self.dim] * shape[self.dim + 1], *shape[self.dim + 2 :])


def cut_of(placed: Placement, data_axes: Axes) -> Cut | None:
    """Returns how the data axes cut a variable's state where layers need it whole over them; else None."""
    mesh: Any = placed.state.mesh
    rows = tuple(axis for axis in data_axes if mesh.shape[axis] > 1)
    state, compute, storage = (of_native(layout).dims for layout in (placed.state, placed.compute, placed.storage))
    found = [dim for dim, cut in enumerate(state) if set(cut) & set(rows)]
    if len(found) != 1 or any(set(cut) & set(rows) for cut in compute):
        return None
    (dim,) = found
    axes = tuple(axis for axis in rows if axis in state[dim])
    others = state[dim][: -len(axes)]
    if state[dim][len(others) :] != axes:
        return None
    return Cut(mesh, axes, rows, dim, places(mesh, others), stored=dim < len(storage) and storage[dim] == state[dim])


def by_shard(cut: Cut, program: Callable[..., Any], takes: Any, gives: Any) -> Callable[..., Any]:
    """The program run by each data shard on its part. Other axes than the data's stay the compiler's."""
    return jax.shard_map(
        program, mesh=cut.mesh, in_specs=takes, out_specs=gives, axis_names=set(cut.rows), check_vma=False
    )


def gathered(cut: Cut, shard: Any, dtype: Any = None) -> Any:
    """Inside a region: the whole value of a shard. S -> F; the adjoint is reduce_scatter.

    A region adds the gradients of replicas itself, as those of all that it is given whole.

    Args:
        dtype: in which it is sent and given, where that is not its own. Gradients are summed in its own.
    """
    return _all_gather(cut, shard) if dtype is None else _gathering(cut, str(dtype), str(shard.dtype))(shard)


def _all_gather(cut: Cut, shard: Any) -> Any:
    return cut.joined(jax.lax.all_gather(shard, cut.axes, axis=cut.side, tiled=True))


@lru_cache(maxsize=1024)
def _gathering(cut: Cut, dtype: str, own: str) -> Any:
    @jax.custom_vjp
    def gather(shard: Any) -> Any:
        return _all_gather(cut, shard.astype(dtype))

    def forward(shard: Any) -> tuple[Any, None]:
        return gather(shard), None

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (_reduce_scatter(cut, gradient.astype(own)),)

    gather.defvjp(forward, backward)
    return gather


def _reduce_scatter(cut: Cut, gradient: Any) -> Any:
    return jax.lax.psum_scatter(cut.laid(gradient), cut.axes, scatter_dimension=cut.side, tiled=True)


def stacked(cut: Cut, value: Any) -> Any:
    """Fans a whole value out, I -> F: a stack of it, each data shard holding its own.

    The adjoint is reduce_scatter: P -> S.
    """
    return _stacking(cut)(value)


@lru_cache(maxsize=1024)
def _stacking(cut: Cut) -> Any:
    stack, replicas = PartitionSpec(cut.rows), tuple(axis for axis in cut.rows if axis not in cut.axes)

    @jax.custom_vjp
    def fan(value: Any) -> Any:
        return by_shard(cut, lambda whole: whole[None], PartitionSpec(), stack)(value)

    def forward(value: Any) -> tuple[Any, None]:
        return fan(value), None

    def backward(_: None, gradients: Any) -> tuple[Any]:
        def reduced(own: Any) -> Any:
            part = _reduce_scatter(cut, own[0])
            return jax.lax.psum(part, replicas) if replicas else part

        return (cut.joined(by_shard(cut, reduced, stack, cut.spec)(gradients)),)

    fan.defvjp(forward, backward)
    return fan

"""Layout: for each mesh axis, the state a tensor is in: S(dim), P, I or F."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from unidist.algebra.checks import fields_of
from unidist.algebra.mesh import Axes, Mesh
from unidist.errors import LayoutError

ReduceOp = Literal["sum", "mean", "max", "min", "prod"]
State = Literal["S", "P", "I", "F"]
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "mean", "max", "min", "prod")


@dataclass(frozen=True, init=False)
class Layout:
    """The layout of a tensor on a mesh: on each axis sharded, partial, fan-out or invariant (the default).

    - S(dim): cut along a dimension, torch.chunk's sizes. Several axes on one dim are nested, major first.
    - P: partial: the value is the sum (or mean, max, min, prod) over the axis of what the ranks hold.
    - I: invariant: the same on every rank of the axis, and so is its gradient.
    - F: fan-out: the same on every rank of the axis, but its gradient arrives partial.

    Args:
        dims: for each tensor dim `None`, an axis, or a tuple of axes (major first). Trailing dims may be left
            out: they are not sharded.
        partial: an axis, several, or a mapping axis -> op ("sum", "mean", "max", "min", "prod").
        fanout: an axis or several.

    Raises:
        LayoutError: an axis in two places, an unknown reduce op, or ops that do not commute (sum and max).

    Sources: the S/P/R placements of GSPMD (arXiv:2105.04663) and DTensor, with replication split into I and F as
    in Megatron-LM's conjugate operators f and g (arXiv:1909.08053).

    Example:
        >>> from unidist import Layout
        >>> Layout("data", None, "model")
        Layout('data', None, 'model')
        >>> Layout(partial="model").dual()
        Layout(fanout='model')
    """

    dims: tuple[Axes, ...]
    partial: tuple[tuple[str, ReduceOp], ...]
    fanout: Axes

    def __init__(
        self,
        *dims: str | Axes | None,
        partial: str | Axes | Mapping[str, ReduceOp] | None = None,
        fanout: str | Axes | None = None,
    ) -> None:
        cut = [_axes(dim) for dim in dims]
        while cut and not cut[-1]:
            cut.pop()
        ops: dict[str, ReduceOp] = (
            dict(partial) if isinstance(partial, Mapping) else dict.fromkeys(_axes(partial), "sum")
        )
        fan = _axes(fanout)
        for axis, op in ops.items():
            if op not in REDUCE_OPS:
                raise LayoutError(f"unknown reduce op {op!r} for axis {axis!r}: one of {REDUCE_OPS}")
        used = [axis for dim in cut for axis in dim] + list(ops) + list(fan)
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        if twice:
            raise LayoutError(
                f"axis {twice[0]!r} is used twice in {dims}, partial={ops}, fanout={fan}: "
                "an axis can shard one dim, be partial or be fanned out, once"
            )
        if len({"sum" if op == "mean" else op for op in ops.values()}) > 1:
            raise LayoutError(
                f"partial={ops} mixes reductions whose order would change the value: "
                "an array is partial by one op (sum and mean go together)"
            )
        object.__setattr__(self, "dims", tuple(cut))
        object.__setattr__(self, "partial", tuple(sorted(ops.items())))
        object.__setattr__(self, "fanout", tuple(sorted(fan)))

    def __repr__(self) -> str:
        parts = [repr(dim[0] if len(dim) == 1 else (dim or None)) for dim in self.dims]
        if self.partial:
            ops = dict(self.partial)
            plain = set(ops.values()) == {"sum"}
            names = tuple(ops) if len(ops) > 1 else next(iter(ops))
            parts.append(f"partial={names if plain else ops!r}" if not plain else f"partial={names!r}")
        if self.fanout:
            parts.append(f"fanout={(self.fanout if len(self.fanout) > 1 else self.fanout[0])!r}")
        return f"Layout({', '.join(parts)})"

    @property
    def in_words(self) -> str:
        """Says it in words, as tables show it.

        Example:
            >>> Layout().in_words, Layout(None, "model").in_words
            ('replicated', 'split on dim 1 over model')
            >>> Layout("data", partial="model").in_words
            'split on dim 0 over data, parts of a sum over model'
        """
        cut = ", ".join(f"on dim {dim} over {' and '.join(axes)}" for dim, axes in enumerate(self.dims) if axes)
        parts = [f"split {cut}"] if cut else []
        for op in dict.fromkeys(op for _, op in self.partial):
            over = " and ".join(axis for axis, other in self.partial if other == op)
            parts.append(f"parts of a {op} over {over}")
        if self.fanout:
            parts.append(f"its gradient is parts of a sum over {' and '.join(self.fanout)}")
        return ", ".join(parts) or "replicated"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial, self.fanout))

    def __getstate__(self) -> dict[str, Any]:
        return fields_of(self)

    @property
    def partial_axes(self) -> Axes:
        """The axes over which the tensor is partial."""
        return tuple(axis for axis, _ in self.partial)

    @property
    def sharded_axes(self) -> Axes:
        """The axes that cut the tensor, in the order of the dims that they cut."""
        return tuple(axis for dim in self.dims for axis in dim)

    def dim_axes(self, dim: int) -> Axes:
        """The axes that cut a (non-negative) dim, major first."""
        return self.dims[dim] if dim < len(self.dims) else ()

    def dim_of(self, axis: str) -> int | None:
        """The dim that the axis cuts, or None."""
        return next((dim for dim, axes in enumerate(self.dims) if axis in axes), None)

    def op_of(self, axis: str) -> ReduceOp | None:
        """By what the axis is to be reduced, or None where it is not partial."""
        return dict(self.partial).get(axis)

    def state(self, axis: str) -> State:
        """ "S", "P", "F" or "I": what an axis is that the layout does not name."""
        if axis in self.partial_axes:
            return "P"
        if axis in self.fanout:
            return "F"
        return "S" if self.dim_of(axis) is not None else "I"

    def dual(self) -> Layout:
        """The layout of the gradient: F and P change places, S and I stay.

        Raises:
            LayoutError: an axis is partial by max, min or prod, which are not linear: their gradient is no layout.
        """
        other = [axis for axis, op in self.partial if op not in ("sum", "mean")]
        if other:
            raise LayoutError(f"{self} has no dual: axis {other[0]!r} is partial by {self.op_of(other[0])}")
        return Layout(*self.dims, partial=self.fanout, fanout=self.partial_axes)

    def with_axis(
        self,
        axes: Axes,
        state: State,
        *,
        dim: int | None = None,
        op: ReduceOp = "sum",
    ) -> Layout:
        """This layout with the axes put into another state; S appends them to `dim` as its minor axes."""
        dims = [tuple(a for a in d if a not in axes) for d in self.dims]
        partial = {a: o for a, o in self.partial if a not in axes}
        fanout = tuple(a for a in self.fanout if a not in axes)
        if state == "S":
            if dim is None:
                raise LayoutError("state S needs a dim")
            dims += [()] * (dim + 1 - len(dims))
            dims[dim] += axes
        elif state == "P":
            partial |= dict.fromkeys(axes, op)
        elif state == "F":
            fanout += axes
        return Layout(*dims, partial=partial, fanout=fanout)

    def check(self, mesh: Mesh, ndim: int | None = None) -> Layout:
        """This layout. Raises LayoutError where it does not fit the mesh or the number of dims."""
        for axis in (*self.sharded_axes, *self.partial_axes, *self.fanout):
            if axis not in mesh.axis_names:
                raise LayoutError(f"{self} names axis {axis!r}, but the mesh has {dict(mesh.axes)}")
        if ndim is not None and len(self.dims) > ndim:
            raise LayoutError(f"{self} shards dim {len(self.dims) - 1} of a tensor that has {ndim} dims")
        return self


def _axes(value: str | Axes | None) -> Axes:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    names = tuple(value) if isinstance(value, tuple | list) else (value,)
    for name in names:
        if not isinstance(name, str):
            raise LayoutError(f"an axis must be a name, found {name!r}")
    return names

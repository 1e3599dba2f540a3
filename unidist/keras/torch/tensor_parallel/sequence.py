"""Sequence parallelism: between a row layer and the next column layer each rank holds a part of the sequence.

A row layer's sum is reduce_scattered along dim 1 (P -> S) and not all_reduced, and a column layer all_gathers what it
takes (S -> F): together as many bytes, and in between normalizations, dropout and residual sums work on 1/n of the
activations. What is in between is a SequencePart: to everybody a tensor of the whole shape; of it this rank holds
its part. Operations on it go by a table (rowwise.py): those that treat each place of the sequence alone are computed on
the part; for any other the whole is gathered first. So nothing is assumed of layers or models, and nothing is wrong
that is not in the table: it only sends more.

Weights that are the same on all ranks get from each rank the gradient of its part of the sequence: I -> F, whose sums
for all weights are one all_reduce at the end of backward.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from unidist import events
from unidist.algebra import Axes, Layout
from unidist.errors import CapabilityError
from unidist.keras.calls import Call, Stage
from unidist.keras.compat import get_keras_mask, set_keras_mask, tree
from unidist.keras.torch.calls import around_call
from unidist.keras.torch.context import Frame
from unidist.keras.torch.moving import cut_dim, move
from unidist.keras.torch.rows import rowwise
from unidist.keras.torch.rows.parts import Part, has_gradient, whole
from unidist.keras.torch.world import RankWorld

# The dim that is cut: of (batch, sequence, features), and of whatever else has a dim behind the batch.
DIM = 1
# The purpose of what is sent where no layer with a cut kernel asks for it.
_WHY = "parts of the sequence"
# What torch notes of a cast, and of a view that keeps the order of the elements.
_TAKING = ("ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "AliasBackward0", "ReshapeAliasBackward0")


class SequencePart(Part):
    """A tensor that is the same on all ranks of `axes`; each holds a part of it along dim 1."""

    DIM = DIM
    TABLE = rowwise.table(DIM)

    axes: Axes
    _fanned: torch.Tensor | None

    @staticmethod
    def of(frame: Frame, part: torch.Tensor, shape: tuple[int, ...], axes: Axes) -> SequencePart:
        made = SequencePart._made(frame, part, shape)
        made.axes, made._fanned = axes, None
        return made

    def like(self, part: torch.Tensor, shape: tuple[int, ...]) -> SequencePart:
        return SequencePart.of(self.frame, part, shape, self.axes)

    def goes_with(self, other: Part) -> bool:
        return isinstance(other, SequencePart) and other.axes == self.axes

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        return _operand(self, x)

    def whole(self) -> torch.Tensor:
        """The whole, on every rank: S -> I (all_gather forward, a slice backward). Gathered once."""
        if self._part is not None and not self._serves(self._whole):
            if self._fanned is not None and self._serves(self._fanned):
                # Gathered for a column layer already: this gradient goes with that one's.
                self._whole = self._moved(self._fanned, Layout(fanout=self.axes), Layout())
            else:
                self._whole = self._moved(self._part, self._cut, Layout())
            mask = get_keras_mask(self)
            if mask is not None:
                set_keras_mask(self._whole, mask)
        if self._whole is None:
            raise RuntimeError("a SequencePart that holds nothing")
        return self._whole

    def fanned_out(self) -> torch.Tensor:
        """The whole for computing that differs by rank: S -> F (all_gather forward, reduce_scatter backward)."""
        if self._part is None:
            return self._moved(self.whole(), Layout(), Layout(fanout=self.axes))
        if self._fanned is None or not self._serves(self._fanned):
            self._fanned = self._moved(self._part, self._cut, Layout(fanout=self.axes))
        return self._fanned

    @property
    def _cut(self) -> Layout:
        return cut_dim(self.ndim, DIM, self.axes)

    def _moved(self, x: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
        with events.for_purpose(events.purpose() or _WHY):
            return move(self.frame, x, tuple(self.shape), src, dst)


def cut(frame: Frame, y: torch.Tensor, shape: tuple[int, ...], src: Layout, axes: Axes) -> SequencePart:
    """A tensor of the global `shape` from its layout to parts of the sequence."""
    return SequencePart.of(frame, move(frame, y, shape, src, cut_dim(len(shape), DIM, axes)), shape, axes)


def check(model: Any) -> None:
    """Raises CapabilityError where layers are computed again in backward, which torch does not do with parts."""
    for layer in model._flatten_layers():
        mode = getattr(layer, "_remat_mode", None)
        if mode is not None and mode.mode is not None:
            raise CapabilityError(
                f"sequence_parallel=True: layer {layer.name!r} was made inside keras.RematScope(mode={mode.mode!r}), "
                "and parts of sequences cannot be computed again in backward in this version. Make the model outside "
                "of the scope, or leave sequence_parallel out"
            )


def give_whole(model: Any) -> None:
    """Lets a model give whole tensors: losses, metrics and predictions know nothing of parts."""

    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        return tree.map_structure(whole, rest(*args, **kwargs))

    around_call(model, Stage.WHOLE, inside)


def can_be_cut(frame: Frame, shape: tuple[int, ...], axes: Axes) -> bool:
    """Whether a tensor has a sequence to cut: a dim between rows and features, with a place for each rank."""
    return len(shape) > DIM + 1 and shape[DIM] >= frame.world.mesh.axis_size(axes)


# whole tensors that meet parts ----------------------------------------------------------------------------------------


def _operand(like: SequencePart, x: torch.Tensor) -> torch.Tensor:
    """What of a whole tensor meets a part: its part of the sequence (I -> S), or all of it (I -> F)."""
    dim = DIM - (like.ndim - x.ndim)
    if dim < 0 or x.shape[dim] == 1:
        return _shared(like.frame, x, like.axes)
    # Dims that were only broadcast are cut, and their gradients gathered, once.
    lean = x
    for other in range(x.ndim):
        if other != dim and x.stride(other) == 0 and x.shape[other] > 1:
            lean = lean.narrow(other, 0, 1)
    with events.for_purpose(events.purpose() or _WHY):
        part = move(like.frame, lean, tuple(lean.shape), Layout(), cut_dim(x.ndim, dim, like.axes))
    return part.expand(*x.shape[:dim], part.shape[dim], *x.shape[dim + 1 :])


def _shared(frame: Frame, x: torch.Tensor, axes: Axes) -> torch.Tensor:
    if not has_gradient(x):
        return x
    known = frame.shared.fanned_out(x, axes) if frame.shared is not None else None
    return move(frame, x, tuple(x.shape), Layout(), Layout(fanout=axes)) if known is None else known


# weights --------------------------------------------------------------------------------------------------------------


class SharedWeights:
    """The weights of a model that are whole on every rank, for one step of a rank.

    Used on parts of the sequence they get partial gradients, which are summed together. Other uses of the same weight
    go past it.
    """

    def __init__(self, frame: Frame, leaves: Iterable[torch.Tensor]) -> None:
        self._frame = frame
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._place = {id(leaf): k for k, leaf in enumerate(self._leaves)}
        self._fanned: dict[Axes, tuple[torch.Tensor, ...]] = {}

    def fanned_out(self, x: torch.Tensor, axes: Axes) -> torch.Tensor | None:
        """I -> F of a weight, or of one that was cast or laid in its own shape; None where x is neither."""
        leaf = x if id(x) in self._place else _taken_from(x)
        place = None if leaf is None else self._place.get(id(leaf))
        if place is None:
            return None
        if axes not in self._fanned:
            self._fanned[axes] = _FanOut.apply(  # type: ignore[no-untyped-call]
                self._frame.world, axes, *self._leaves
            )
        return self._fanned[axes][place].to(x.dtype)


def _taken_from(x: torch.Tensor) -> torch.Tensor | None:
    """The leaf that a tensor was taken from, if that was cast at most, and has its shape."""
    node: Any = x.grad_fn
    while node is not None and node.name() in _TAKING:
        node = node.next_functions[0][0]
    leaf: torch.Tensor | None = getattr(node, "variable", None)
    return leaf if leaf is not None and leaf.shape == x.shape else None


class _FanOut(torch.autograd.Function):
    """I -> F of many tensors: their gradients are summed over the axes by one all_reduce for each dtype."""

    @staticmethod
    def forward(ctx: Any, world: RankWorld, axes: Axes, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not the frame: it holds what comes out here.
        ctx.world, ctx.axes = world, axes
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        out = list(grads)
        given = {k: grad for k, grad in enumerate(grads) if grad is not None}
        with events.for_purpose(f"weights on {_WHY}"):
            sums = ctx.world.summed(list(given.values()), ctx.axes)
        for k, total in zip(given, sums, strict=True):
            out[k] = total
        return (None, None, *out)


def dropped_out(x: SequencePart, drop: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """A dropout of the part alone, with random numbers that no other part draws; None where x is whole by now."""
    part, frame = x.part, x.frame
    if part is None:
        return None
    with frame.seeds_at(frame.world.seed_place(frame.rank, x.axes)):
        return SequencePart.of(frame, drop(part), tuple(x.shape), x.axes)

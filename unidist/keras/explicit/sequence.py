"""Sequence parallelism: between a row layer and the next column layer each rank holds a part of the sequence.

A row layer's sum is reduce_scattered along dim 1 (P -> S) and not all_reduced, and a column layer all_gathers what it
takes (S -> F): together as many bytes, and in between normalizations, dropout and residual sums work on 1/n of the
activations. What is in between is a SequencePart: to everybody a tensor of the whole shape, of which this rank holds
its part. Operations on it go by a table (rowwise.py): those that treat each place of the sequence alone are computed on
the part; for any other the whole is gathered first. So nothing is assumed of layers or models, and nothing is wrong
that is not in the table: it only sends more.

Weights that are the same on all ranks get from each rank the gradient of its part of the sequence: I -> F, whose sums
for all weights are one all_reduce at the end of backward.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from unidist import events
from unidist.algebra import Axes, Layout, Sharding
from unidist.errors import CapabilityError
from unidist.keras.compat import backend, get_keras_mask, set_keras_mask, tree
from unidist.keras.explicit import rowwise
from unidist.keras.explicit.context import Frame
from unidist.keras.explicit.moving import cut_dim, move
from unidist.keras.explicit.world import RankWorld

# The dim that is cut: of (batch, sequence, features), and of whatever else has a dim behind the batch.
DIM = 1
# The purpose of what is sent where no layer with a cut kernel asks for it.
_WHY = "parts of the sequence"
_CONSTANTS = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class SequencePart(torch.Tensor):
    """A tensor that is the same on all ranks of `axes`, of which each holds a part along dim 1 (torch.chunk's sizes).

    Its shape is the whole one. Functions of torch on it give what they would give of the whole: as parts where they
    treat each place of the sequence alone, else of the gathered whole. What writes into it makes it whole first.
    """

    frame: Frame
    axes: Axes
    _part: torch.Tensor | None
    _whole: torch.Tensor | None
    _fanned: torch.Tensor | None

    @staticmethod
    def of(frame: Frame, part: torch.Tensor, shape: tuple[int, ...], axes: Axes) -> SequencePart:
        made: SequencePart = torch.Tensor._make_wrapper_subclass(
            SequencePart, shape, dtype=part.dtype, device=part.device
        )
        made.frame, made.axes = frame, axes
        made._part, made._whole, made._fanned = part, None, None
        return made

    @property
    def part(self) -> torch.Tensor | None:
        """This rank's part; None once it was written into."""
        return self._part

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

    def _serves(self, known: torch.Tensor | None) -> bool:
        """Whether what was gathered before can be used here: not without a gradient where one is wanted."""
        part = self._part
        return known is not None and (known.requires_grad or part is None or not _has_gradient(part))

    def __repr__(self) -> str:  # type: ignore[override]
        held = "whole" if self._part is None else tuple(self._part.shape)
        return f"SequencePart(shape={tuple(self.shape)}, axes={self.axes}, held={held})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _values(args), _values(kwargs or {})
        if func in rowwise.OF_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in rowwise.OF_THE_GRAPH:
            return func(args[0]._part if args[0]._part is not None else args[0]._whole, *args[1:], **kwargs)
        condition = rowwise.TABLE.get(func)
        if condition is not None:
            found = _on_parts(func, condition, args, kwargs)
            if found is not None:
                return found
        out = func(*_wholes(args), **_wholes(kwargs))
        written = [kwargs.get("out"), args[0] if args and rowwise.writes(func, kwargs) else None]
        for x in written:
            if isinstance(x, SequencePart):
                x._part = None
                out = x if out is x._whole else out
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} reached a SequencePart past its __torch_function__")


def cut(frame: Frame, y: torch.Tensor, shape: tuple[int, ...], src: Layout, axes: Axes) -> SequencePart:
    """A tensor of the global `shape` from its layout to parts of the sequence."""
    return SequencePart.of(frame, move(frame, y, shape, src, cut_dim(len(shape), DIM, axes)), shape, axes)


def whole(x: Any) -> Any:
    """What a SequencePart is a part of; anything else as it is."""
    return x.whole() if isinstance(x, SequencePart) else x


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
    original = model.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return tree.map_structure(whole, original(*args, **kwargs))

    object.__setattr__(model, "call", call)


def can_be_cut(frame: Frame, shape: tuple[int, ...], axes: Axes) -> bool:
    """Whether a tensor has a sequence to cut: a dim between rows and features, with a place for each rank."""
    return len(shape) > DIM + 1 and shape[DIM] >= frame.world.mesh.axis_size(axes)


# functions of torch on parts ------------------------------------------------------------------------------------------


def _on_parts(func: Any, condition: Any, args: Any, kwargs: Any) -> Any:
    """func of this rank's parts, as a part; None where it is not that of the whole."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, SequencePart)]
    if not given or any(x._part is None for x in given):
        return None
    first = given[0]
    shape, ndim = tuple(first.shape), first.ndim
    if any(x.axes != first.axes or x.ndim != ndim or x.shape[DIM] != shape[DIM] for x in given):
        return None
    if not condition(ndim, args, kwargs):
        return None
    if not all(_fits(x, ndim, shape[DIM]) for x in (*args, *kwargs.values())):
        return None

    def local(x: Any) -> Any:
        if isinstance(x, SequencePart):
            return x._part
        return _operand(first, x) if isinstance(x, torch.Tensor) else x

    out = func(*(local(x) for x in args), **{name: local(x) for name, x in kwargs.items()})
    if not isinstance(out, torch.Tensor):
        return out
    for x in given:
        # As it was, to its own dtype or the like: what was gathered of it goes on to serve.
        if out is x._part:
            return x
    return SequencePart.of(first.frame, out, (out.shape[0], shape[DIM], *out.shape[DIM + 1 :]), first.axes)


def _fits(x: Any, ndim: int, length: int) -> bool:
    """Whether an argument means beside parts what it means beside the whole: a constant, or what broadcasts alike."""
    if isinstance(x, torch.Tensor):
        dim = DIM - (ndim - x.ndim)
        return x.ndim <= ndim and (dim < 0 or x.shape[dim] in (1, length))
    if isinstance(x, (list, tuple)):
        return all(isinstance(entry, int) for entry in x)
    return x is None or isinstance(x, _CONSTANTS)


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
    if not _has_gradient(x):
        return x
    known = frame.shared.fanned_out(x, axes) if frame.shared is not None else None
    return move(frame, x, tuple(x.shape), Layout(), Layout(fanout=axes)) if known is None else known


def _has_gradient(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _wholes(value: Any) -> Any:
    return _mapped(whole, value)


def _values(value: Any) -> Any:
    """With the values of Keras's variables, which torch's functions take as well."""
    return _mapped(lambda x: x.value if isinstance(x, backend.Variable) else x, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A function on all leaves of a call's arguments."""
    if isinstance(value, dict):
        return {key: _mapped(function, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        found = [_mapped(function, x) for x in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return function(value)


# weights --------------------------------------------------------------------------------------------------------------


class SharedWeights:
    """The weights of a model that lie whole on every rank, for one step of a rank.

    Used on parts of the sequence they get partial gradients, which are summed together. Other uses of the same weight
    go past it.
    """

    def __init__(self, frame: Frame, leaves: Iterable[torch.Tensor]) -> None:
        self._frame = frame
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._place = {id(leaf): k for k, leaf in enumerate(self._leaves)}
        self._fanned: dict[Axes, tuple[torch.Tensor, ...]] = {}

    def fanned_out(self, x: torch.Tensor, axes: Axes) -> torch.Tensor | None:
        """I -> F of a weight, or of a weight that was cast; None where x is neither."""
        leaf = x if id(x) in self._place else _cast_from(x)
        place = None if leaf is None else self._place.get(id(leaf))
        if place is None:
            return None
        if axes not in self._fanned:
            self._fanned[axes] = _FanOut.apply(  # type: ignore[no-untyped-call]
                self._frame.world, axes, *self._leaves
            )
        return self._fanned[axes][place].to(x.dtype)


def _cast_from(x: torch.Tensor) -> torch.Tensor | None:
    """The leaf that a tensor was cast from, if that is all that was done to it."""
    node: Any = x.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)


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
        given = [(k, grad) for k, grad in enumerate(grads) if grad is not None]
        for dtype in dict.fromkeys(grad.dtype for _, grad in given):
            alike = [(k, grad) for k, grad in given if grad.dtype == dtype]
            flat = torch.cat([grad.reshape(-1) for _, grad in alike])
            partial = Sharding(ctx.world.mesh, Layout(partial=ctx.axes), tuple(flat.shape))
            with events.for_purpose(f"weights on {_WHY}"):
                flat = ctx.world.backend.redistribute(flat, partial, partial.with_layout(Layout()))
            sums = flat.split([grad.numel() for _, grad in alike])
            for (k, grad), total in zip(alike, sums, strict=True):
                out[k] = total.view(grad.shape)
        return (None, None, *out)


def dropped_out(x: SequencePart, drop: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """A dropout of the part alone, with random numbers that no other part draws; None where x is whole by now."""
    part, frame = x.part, x.frame
    if part is None:
        return None
    with frame.seeds_at(frame.world.seed_place(frame.rank, x.axes)):
        return SequencePart.of(frame, drop(part), tuple(x.shape), x.axes)

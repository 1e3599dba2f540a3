"""Dispatch: each expert of a stack computes the rows that it has a weight for, and no others.

A layer with stacked kernels gives what each of them makes of each row: (kernels, rows, ...). Models go on with the sum
of that over the kernels, with weights that are zero for most. So the layer's call waits (outputs.py) until its outputs
are multiplied by weights and summed. Then each kernel is called with its own rows, as the layer itself is, and what
comes is summed. No row is dropped, and no buffer can be full. Whoever asks for anything else gets all outputs.

That this is right is shown at a layer's first call, by its values and by autograd; else all is computed, and `describe`
says why.

Source: Shazeer et al. 2017, arXiv:1701.06538, for mixtures of experts; Gale et al. 2022, "MegaBlocks",
arXiv:2211.15841, for experts without dropped rows.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from unidist.algebra import Axes
from unidist.backends.torch.sharded import ShardedTensor, wrap
from unidist.backends.torch.sharded.moving import plain_in
from unidist.keras.layer_facts import stack_of
from unidist.keras.patching.compat import get_device
from unidist.keras.patching.layer_calls import Call, Stage
from unidist.keras.records.layer_report import in_words
from unidist.keras.torch import features
from unidist.keras.torch.context import Frame, around_call, infers_shapes
from unidist.keras.torch.layers.outputs import Bank, Kernels, Outputs
from unidist.keras.torch.layers.rules import DISPATCH, sending_axes
from unidist.keras.torch.layers.sending import Sending
from unidist.propagation.layouts import WHOLE, Cut
from unidist.strategies import Strategy

# Rows that the first call compares, at most, and how near they must be.
_COMPARED, _NEAR = 8, 1e-4


def give(layers: list[Any], strategy: Strategy) -> None:
    """Lets layers with stacked kernels wait for the weights of what they give, if the strategy says so."""
    for layer in layers:
        known: Dispatch | None = vars(layer).get(DISPATCH)
        if strategy.experts != "dispatch":
            if known is not None:
                known.take_off()
                object.__delattr__(layer, DISPATCH)
        elif known is None and stack_of(layer):
            object.__setattr__(layer, DISPATCH, Dispatch(layer))


class Dispatch:
    """Stands before the call of one layer, with what each rank of this process has found of it.

    Attributes:
        reasons: by rank: why it computes all; "" where it does not. None are there before its first call.
        skips: by rank: whether weights that are zero have no gradient; not there before it was looked at.
        shape: of what a kernel makes of a row.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        # Numbers of a dropout would be others. Code that draws past a generator of Keras's shows at the first call.
        self.draws = any(getattr(one, "_seed_generators", None) for one in layer._flatten_layers())
        self.reasons: dict[int, str] = {}
        self.skips: dict[int, bool] = {}
        self.shape: tuple[int, ...] = ()
        self.dtype = torch.float32
        self.take_off = around_call(layer, Stage.KERNELS, self)

    @property
    def told(self) -> str:
        """Says for `describe` what it does; "" before its first call."""
        reason = next(filter(None, self.reasons.values()), "")
        if reason:
            return f"all experts compute all rows: {reason}"
        sent = ", and which are sent to its device" if sending_axes(self.layer) else ""
        return f"dispatch: each expert computes the rows that it has a weight for{sent}" if self.reasons else ""

    def __call__(self, frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        is_asked = infers_shapes() or frame.is_tracing or frame.world.rehearses
        if not is_asked and len(args) == 1 and isinstance(args[0], torch.Tensor) and not self.reasons.get(frame.rank):
            waiting = self._waiting(frame, functools.partial(rest, **kwargs), args[0], *self._kernels(frame))
            if waiting is not None:
                return waiting
        with frame.reading(self._wholes(frame)):
            return rest(*args, **kwargs)

    def _waiting(self, frame: Frame, rest: Call, x: Any, axes: Axes, kernels: Kernels) -> torch.Tensor | None:
        """Returns what the layer would give of x; None where it is to compute it."""
        if type(x) is ShardedTensor and (not axes or x.spec.space is not features.space_over(frame, axes)):
            return self._of_parts(frame, rest, x, axes, kernels)
        x = features.fanned_out(frame, x, axes) if axes else x

        def compute(some: Kernels, rows: torch.Tensor) -> torch.Tensor:
            with frame.reading(some):
                return rest(rows)  # type: ignore[no-any-return]

        sending = self._sending(frame)
        wholes = None if sending is None else functools.partial(self._wholes, frame)
        bank = Bank(compute, kernels, x, functools.partial(self._may_skip, frame), sending, wholes)
        if frame.rank not in self.reasons:
            self.reasons[frame.rank] = _agreed(frame, self._look(bank))
        if self.reasons[frame.rank]:
            return None
        own, size = len(next(iter(kernels.values()))), stack_of(self.layer)[0].shape[0]
        out = Outputs.of(bank, (size if sending else own, len(x), *self.shape), self.dtype)
        return features.given(frame, out, 0, size, axes) if axes else out

    def _of_parts(
        self, frame: Frame, rest: Call, x: ShardedTensor, axes: Axes, kernels: Kernels
    ) -> torch.Tensor | None:
        """Returns the same of a carrier of rows, or of places of sequences, whose first dim is cut."""
        space, states = x.spec.space, x.spec.states
        if not all(state == WHOLE or (isinstance(state, Cut) and state.dim == 0) for state in states):
            return None
        if space.invariant:  # ranks' gradients of kernels are of other rows
            kernels = {name: plain_in(space, kernel, (WHOLE,) * len(states)) for name, kernel in kernels.items()}
        part = self._waiting(frame, rest, x.local, axes, kernels)
        behind = tuple(Cut(1, state.sizes) if isinstance(state, Cut) else state for state in states)
        return None if part is None else wrap(part, space.spec_of(behind, part.shape))

    def _kernels(self, frame: Frame) -> tuple[Axes, Kernels]:
        """The axes that cut the stack, but not rows, and this rank's kernels of each variable, by its id."""
        if sending_axes(self.layer):
            return (), {id(v): v.local(frame) for v in stack_of(self.layer)}
        values = {id(v): v.value for v in stack_of(self.layer)}
        cut = [x for x in values.values() if type(x) is ShardedTensor]
        axes = cut[0].spec.space.lines[0] if cut else ()
        return axes, {k: x.local if type(x) is ShardedTensor else x for k, x in values.items()}

    def _sending(self, frame: Frame) -> Sending | None:
        """Returns what sends rows to other ranks' kernels, where the stack is cut over data axes."""
        axes = sending_axes(self.layer)
        if not axes:
            return None
        return Sending(frame, axes, stack_of(self.layer)[0]._storage.sharding.pieces(frame.rank, 0, axes))

    def _wholes(self, frame: Frame) -> Kernels:
        """All kernels of a stack that is cut over data axes; of another one nothing."""
        return {id(v): v.whole(frame) for v in stack_of(self.layer)} if sending_axes(self.layer) else {}

    def _look(self, bank: Bank) -> str:
        """Compares what all kernels make of some rows with what some make of some; says what is otherwise."""
        if self.draws:
            return "it draws random numbers"
        some, count = bank.rows[:_COMPARED], len(next(iter(bank.kernels.values())))
        if not count or any(len(kernel) != count for kernel in bank.kernels.values()):
            return "of its stack some is cut, and some is not"
        with torch.no_grad():
            out = bank.compute(bank.kernels, some)
            if not isinstance(out, torch.Tensor) or out.shape[:2] != (count, len(some)):
                return "what it gives is not stacked as its kernels are"
            self.shape, self.dtype = tuple(out.shape[2:]), out.dtype
            try:
                is_alone = _are_alone(bank, some, out)
            except Exception as error:  # whatever a layer may raise that counts its kernels
                return f"called with one kernel it raises {type(error).__name__}: {in_words(error)}"
        return "" if is_alone else "its kernels do not compute one by one, or its rows do not"

    def _may_skip(self, frame: Frame, weights: torch.Tensor) -> bool:
        """Returns whether zeros may be left out: they have no gradient, whatever comes from above."""
        if not (weights.requires_grad and torch.is_grad_enabled()):
            return True
        if frame.rank not in self.skips:
            reason = _agreed(frame, "" if _have_no_gradient(weights) else "weights that are zero have a gradient")
            self.skips[frame.rank] = not reason
            self.reasons[frame.rank] = reason
        return self.skips[frame.rank]


def _are_alone(bank: Bank, some: torch.Tensor, out: torch.Tensor) -> bool:
    """Returns whether the first and the last kernel alone make the same of every other row alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in (0, len(out) - 1):
            own = {name: kernel[k : k + 1] for name, kernel in bank.kernels.items()}
            alone = bank.compute(own, some[1::2])
            wanted = out[k : k + 1, 1::2]
            if alone.shape != wanted.shape or not torch.allclose(alone, wanted, _NEAR, _NEAR, equal_nan=True):
                return False
    return True


def _agreed(frame: Frame, reason: str) -> str:
    """A reason that all ranks have, where one has one."""
    world = frame.world
    axes = tuple(axis for axis in world.mesh.axis_names if world.mesh.axis_size(axis) > 1)
    if not axes:
        return reason
    (count,) = world.summed([torch.tensor(float(bool(reason)), device=get_device())], axes)
    return reason or ("it is so on another device" if count.item() else "")


def _have_no_gradient(weights: torch.Tensor) -> bool:
    """Returns whether nothing that learns has a gradient by way of the weights that are zero."""
    zeros = (weights.detach() == 0).to(weights.dtype)
    # Other numbers in each place, so that they do not cancel.
    above = zeros * torch.arange(1.0, zeros.numel() + 1).to(zeros).reshape(zeros.shape)
    leaves = _leaves(weights.grad_fn)
    found = torch.autograd.grad(weights, leaves, above, retain_graph=True, allow_unused=True) if leaves else ()
    return all(gradient is None or not gradient.any() for gradient in found)


def _leaves(node: Any) -> list[torch.Tensor]:
    """The tensors that a graph begins with."""
    seen, waiting, found = {node}, [node], []
    while waiting:
        one = waiting.pop()
        if hasattr(one, "variable"):
            found.append(one.variable)
        for before, _ in one.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
    return found

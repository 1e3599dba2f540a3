"""Sequence parallelism: from a row layer to the next column layer a rank holds a part of the sequence.

A row layer's sum is reduce_scattered along dim 1 (P -> S) and not all_reduced, and a column layer all_gathers what it
takes (S -> F): together as many bytes, and in between normalizations, dropout and residual sums work on 1/n of the
activations. What is in between is a carrier (features.py), whose sequence is cut: operations on it go by their rules.

Weights that are the same on all ranks get from each rank the gradient of its part of the sequence: I -> F, whose sums
for all weights are one all_reduce at the end of backward.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unidist import events
from unidist.algebra import Axes, Layout
from unidist.errors import CapabilityError
from unidist.keras.patching.compat import tree
from unidist.keras.patching.layer_calls import Call, Stage
from unidist.keras.torch import features
from unidist.keras.torch.activation_redistribute import cut_dim, move
from unidist.keras.torch.context import Frame, around_call
from unidist.keras.torch.world import RankWorld

# The purpose of what is sent where no layer with a cut kernel asks for it.
_WHY = "parts of the sequence"
# What torch notes of a cast, and of a view that keeps the order of the elements.
_TAKING = ("ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "AliasBackward0", "ReshapeAliasBackward0")


def cut(frame: Frame, y: torch.Tensor, shape: tuple[int, ...], src: Layout, axes: Axes) -> torch.Tensor:
    """A tensor of the global `shape` from its layout to parts of the sequence."""
    part = move(frame, y, shape, src, cut_dim(len(shape), features.SEQUENCE, axes))
    with events.for_purpose(_WHY):
        return features.given(frame, part, features.SEQUENCE, shape[features.SEQUENCE], axes)


def check(model: Any) -> None:
    """Raises CapabilityError where layers are computed again in backward: torch does not so with parts."""
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
        return tree.map_structure(features.whole, rest(*args, **kwargs))

    around_call(model, Stage.WHOLE, inside)


def can_be_cut(frame: Frame, shape: tuple[int, ...], axes: Axes) -> bool:
    """Returns whether a tensor has a sequence to cut.

    That is a dim between rows and features, with a place for each rank.
    """
    at = features.SEQUENCE
    return len(shape) > at + 1 and shape[at] >= frame.world.mesh.axis_size(axes)


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

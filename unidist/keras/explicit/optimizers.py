"""Optimizers work on shards; what looks at norms sees whole variables."""

from __future__ import annotations

from typing import Any

import torch
from keras.src.optimizers.base_optimizer import BaseOptimizer

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.errors import CapabilityError
from unidist.keras.explicit import context, placing
from unidist.keras.explicit.context import Frame


def install() -> None:
    """Patches BaseOptimizer.apply and clipping (Keras 3.15): in a frame, optimizers see shards, and norms are those
    of whole variables."""
    apply, clip, gradients = (
        BaseOptimizer.apply,
        BaseOptimizer._clip_gradients,
        BaseOptimizer._backend_apply_gradients,
    )

    def _apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        frame = context.frame()
        if frame is None:
            return _apply_outside(self, grads, trainable_variables)
        with frame.reading_shards():
            return apply(self, grads, trainable_variables)

    def _apply_outside(self: Any, grads: Any, trainable_variables: Any) -> Any:
        """A loop of the user's own: the rank at work is this process's."""
        targets = trainable_variables if trainable_variables is not None else getattr(self, "_trainable_variables", [])
        world = next((v._place.world for v in targets if placing.is_placed(v)), None)
        if world is None:
            return apply(self, grads, trainable_variables)
        if world.is_virtual:
            raise CapabilityError(
                "optimizer.apply was called outside of fit on a model in the simulator, whose ranks work only inside "
                "fit and train_on_batch: put the loop's body into the model's train_step"
            )
        return world.run(lambda frame: _apply(self, grads, trainable_variables))

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        object.__setattr__(self, "_unidist_clipped", list(trainable_variables))
        return gradients(self, grads, trainable_variables)

    def _clip_gradients(self: Any, grads: Any) -> Any:
        frame, variables = context.frame(), getattr(self, "_unidist_clipped", [])
        if frame is None or not any(placing.is_placed(v) and v._place.is_sharded for v in variables):
            return clip(self, grads)
        return clipped(self, frame, grads, variables)

    BaseOptimizer.apply = _apply
    BaseOptimizer._backend_apply_gradients = _backend_apply_gradients
    BaseOptimizer._clip_gradients = _clip_gradients


def clipped(optimizer: Any, frame: Frame, grads: list[Any], variables: list[Any]) -> list[Any]:
    """Gradients clipped by the norms of whole variables: squares are summed over the axes that shard each."""
    if not (optimizer.clipnorm or optimizer.global_clipnorm):
        value = optimizer.clipvalue
        return [g.clamp(-value, value) for g in grads] if value else grads
    squares = _whole_squares(frame, grads, variables)
    if optimizer.clipnorm:
        limit = optimizer.clipnorm
        return [g * (limit / torch.clamp(s.sqrt(), min=limit)) for g, s in zip(grads, squares, strict=True)]
    limit = optimizer.global_clipnorm
    factor = limit / torch.clamp(sum(squares, torch.zeros(())).sqrt(), min=limit)
    return [g * factor for g in grads]


def _whole_squares(frame: Frame, grads: list[Any], variables: list[Any]) -> list[torch.Tensor]:
    squares = [(g.detach() ** 2).sum() for g in grads]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for k, variable in enumerate(variables):
        axes = variable._place.layout.sharded_axes
        if axes:
            kinds.setdefault(tuple(sorted(axes)), []).append(k)
    for axes, members in kinds.items():
        stacked = torch.stack([squares[k] for k in members])
        partial = Sharding(frame.world.mesh, Layout(partial=axes), tuple(stacked.shape))
        with events.for_purpose("gradient norm"):
            whole = frame.world.backend.redistribute(stacked, partial, partial.with_layout(Layout()))
        for k, value in zip(members, whole.unbind(), strict=True):
            squares[k] = value
    return squares

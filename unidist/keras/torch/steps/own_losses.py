"""A `compute_loss` of the model's own may mix rows: it is given the rows of all shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from unidist.algebra import Layout
from unidist.keras.compat import Trainer, get_keras_mask, set_keras_mask, tree
from unidist.keras.torch import context
from unidist.keras.torch.context import Frame, Rows
from unidist.keras.torch.steps import losses
from unidist.keras.torch.world import RankWorld


def adopt(model: Any, world: RankWorld) -> None:
    """Where the model has a `compute_loss` of its own, it computes with the rows of all shards from now on."""
    if type(model).compute_loss is Trainer.compute_loss or "compute_loss" in vars(model):
        return
    original = model.compute_loss
    names = ("x", "y", "y_pred", "sample_weight", "training")

    @functools.wraps(original)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        frame = context.frame()
        # In a step that sees the rows of all shards it is given those.
        is_given_all = frame is not None and (frame.gathered_loss or frame.sees_rows)
        if frame is None or frame.rows is None or not world.data_axes or is_given_all:
            return original(**given)
        return _of_all_rows(frame, frame.rows, original, given)

    object.__setattr__(model, "compute_loss", compute_loss)


def _of_all_rows(frame: Frame, rows: Rows, compute: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Every rank computes the whole loss and counts for its part of it; gradients come back summed."""
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in tree.flatten(given)):
        return compute(**given)
    world = frame.world
    fan = Layout(fanout=world.data_axes)

    def whole(value: Any, layout: Layout) -> Any:
        return tree.map_structure(lambda t: t if t is None else _gathered(world, t, rows, layout), value)

    gathered = {
        name: value if name == "training" else whole(value, fan if name == "y_pred" else Layout())
        for name, value in given.items()
    }
    frame.gathered_loss = frame.exact_loss = True
    try:
        part = compute(**gathered) / world.mesh.axis_size(world.data_axes)
        return losses.told(frame, [part])[0]
    finally:
        frame.gathered_loss = False


def _gathered(world: RankWorld, t: Any, rows: Rows, layout: Layout) -> torch.Tensor:
    whole = world.gather_rows(torch.as_tensor(t), rows.total, layout)
    mask = get_keras_mask(t)
    if mask is not None:
        set_keras_mask(whole, world.gather_rows(mask, rows.total))
    return whole

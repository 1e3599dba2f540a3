"""Gives activity regularizers that look at several rows those of all shards, in native calls."""

from __future__ import annotations

from typing import Any

import torch

from unidist.keras import activity
from unidist.keras.torch import borders, context
from unidist.keras.torch.context import Rows


def show_all_rows(model: Any) -> None:
    """Lets a model's activity regularizers see the rows of all shards, where that may change them."""
    activity.given(model, lambda layer, name: _look)


def _look(own: Any, output: Any) -> Any:
    frame = context.frame()
    if frame is None or frame.rows is None or not borders.can_begin(frame):
        return own(output)
    return _own_share(frame.rows, borders.on_carriers(frame, frame.rows, own, output))


def _own_share(rows: Rows, loss: Any) -> Any:
    """Scales a loss of all rows so that Keras makes the same loss of it.

    Keras divides by this shard's rows, and the losses of the shards count by their rows.
    """
    if not isinstance(loss, torch.Tensor) or rows.local:
        return loss * rows.share
    # Keras divides by no rows: not a number in backward, which has to come to the collectives all the same.
    return _Nothing.apply(loss)  # type: ignore[no-untyped-call]


class _Nothing(torch.autograd.Function):
    """Zero, and zero gradients whatever comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)

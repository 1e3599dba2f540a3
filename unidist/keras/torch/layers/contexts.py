"""Contexts: axes of the mesh cut the sequences of a batch, and all that a model makes of them.

Each input of a model becomes a carrier whose dim 1 is cut (features.py), and no layer is named anywhere: operations go
by their rules. What treats each place alone stays cut. Where queries meet keys, either keys and values are gathered, or
all are turned to heads and back, whichever sends less; or keys and values go round, where that is asked for. Weights
are whole on each rank, and the sums of their gradients are one all_reduce at the end of backward, as under sequence
parallelism.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509, for attention whose heads are cut meanwhile.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import torch

from unidist import events
from unidist.backends.torch.sharded import Space
from unidist.backends.torch.sharded.masks import Masks
from unidist.keras.patching.compat import get_device
from unidist.keras.patching.layer_calls import Call, Stage
from unidist.keras.torch import features
from unidist.keras.torch.context import Frame, around_call, infers_shapes
from unidist.keras.torch.structures import mapped
from unidist.strategies import Strategy

# How products turn what is cut, for each choice of attention.
_TURNS: dict[str, Literal["no", "less", "always", "ring"]] = {
    "gather": "no", "auto": "less", "ulysses": "always", "ring": "ring",
}  # fmt: skip
# The purpose of what no layer with a name asks for.
_WHY = "contexts"


def give(model: Any, strategy: Strategy) -> None:
    """Lets a model take, and give, parts of sequences that are the whole to all code."""
    axes = strategy.context_axes

    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        if infers_shapes():
            return rest(*args, **kwargs)
        space = features.space_over(frame, axes)
        _choose(space, strategy.attention)
        # What a program keeps is its compiler's.
        space.masks = None if frame.is_tracing else space.masks or Masks()
        with events.for_purpose(_WHY):
            given = mapped(functools.partial(_cut, frame, strategy), (args, kwargs))
            return rest(*given[0], **given[1])

    around_call(model, Stage.WHOLE, inside)


def _choose(space: Space, attention: str) -> None:
    """Plans depend on how products turn their operands."""
    turns = _TURNS[attention]
    if not space.holds or space.turns != turns:
        space.holds, space.lean, space.turns = True, True, turns
        space.plans.clear()


def _cut(frame: Frame, strategy: Strategy, x: Any) -> Any:
    """This rank's places of a sequence, as all of them; anything else as it is."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":  # of train_on_batch: a model of Keras makes tensors inside
        x = torch.as_tensor(x, device=get_device())
    if not isinstance(x, torch.Tensor) or features.is_cut(x):
        return x
    if not strategy.cuts_places(tuple(x.shape), x.is_floating_point()):
        return x
    dim, axes = features.SEQUENCE, strategy.context_axes
    return features.given(frame, features.taken(frame, x, dim, axes), dim, x.shape[dim], axes)

"""Gives whole gradients to optimizers whose `apply` is the user's own: it may look at all of them.

What Keras does behind it is done with parts again (optimizers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidist.errors import CapabilityError
from unidist.keras import own_apply
from unidist.keras.patching.compat import TorchTrainer
from unidist.keras.torch import context
from unidist.keras.torch.params import placing, seen


def install(model: Any) -> None:
    """Gives whole gradients to what the optimizers of a model override."""
    own_apply.install(model, _with_wholes)


def _with_wholes(optimizer: Any, call: Callable[..., Any], grads: Any, trainable_variables: Any = None) -> Any:
    frame = context.frame()
    if frame is None:
        return call(grads, trainable_variables)
    if frame.accumulating:
        methods = " and ".join(own_apply.overridden(optimizer))
        raise CapabilityError(
            f"{type(optimizer).__name__} overrides {methods}, which is not given whole gradients with "
            "gradient_accumulation_steps: override update_step, which is asked for each variable, or compile without "
            "accumulation"
        )
    given = trainable_variables if trainable_variables is not None else getattr(optimizer, "_trainable_variables", [])
    targets = list(given)
    # In a step of the user's own they are whole already, or carriers.
    if targets and (frame.local or not frame.own_step):
        pairs = zip(grads, targets, strict=True)
        grads = [g if g is None or not placing.is_placed(v) else seen.carried(v._storage, g) for g, v in pairs]
    with frame.updating_by_rules() if frame.local else frame.stepping():
        return call(grads, trainable_variables)


def is_own_step(model: Any, name: str) -> bool:
    """Returns whether a step of a model is not Keras's."""
    return name in vars(model) or getattr(type(model), name) is not getattr(TorchTrainer, name)

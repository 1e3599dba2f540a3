"""Gives whole gradients to optimizers whose `apply` is the user's own: it may look at all of them.

What Keras does behind it is done with parts again (optimizers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidist.errors import CapabilityError
from unidist.keras import overridden
from unidist.keras.compat import TorchTrainer
from unidist.keras.torch import context
from unidist.keras.torch.values import placing, seen


def install(model: Any) -> None:
    """Gives whole gradients to what the optimizers of a model override."""
    overridden.install(model, _with_wholes)


def _with_wholes(optimizer: Any, call: Callable[..., Any], grads: Any, trainable_variables: Any = None) -> Any:
    given = trainable_variables if trainable_variables is not None else getattr(optimizer, "_trainable_variables", [])
    targets = list(given)
    cut = {id(v): v for v in targets if placing.is_placed(v) and v._storage.shardings.state.layout.dims}
    frame = context.frame()
    if frame is None and all(v._storage.world.runs_several for v in cut.values()):
        return call(grads, trainable_variables)
    if frame is None or frame.accumulating:
        methods = " and ".join(overridden.overridden(optimizer))
        where = "outside of fit" if frame is None else "with gradient_accumulation_steps"
        remedy = "train by fit" if frame is None else "compile without accumulation"
        raise CapabilityError(
            f"{type(optimizer).__name__} overrides {methods}, which is not given whole gradients {where}: override "
            f"update_step, which is asked for each variable, or {remedy}"
        )
    # In a step of the user's own they are whole already, or carriers.
    if targets and (frame.local or not frame.own_step):
        pairs = zip(grads, targets, strict=True)
        grads = [seen.carried(v._storage, g) if g is not None and id(v) in cut else g for g, v in pairs]
    with frame.updating_by_rules() if frame.local else frame.stepping():
        return call(grads, trainable_variables)


def is_own_step(model: Any, name: str) -> bool:
    """Returns whether a step of a model is not Keras's."""
    return name in vars(model) or getattr(type(model), name) is not getattr(TorchTrainer, name)

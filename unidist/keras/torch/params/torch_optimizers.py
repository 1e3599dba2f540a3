"""torch's own optimizers on a model's parameters, in a step or a loop of the user's own.

They update what a process holds, with the gradient that torch has put on it. Where gradients are reduced elsewhere they
would find none, and train nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unidist.errors import CapabilityError
from unidist.keras.torch import context
from unidist.keras.torch.params import seen, sharded_norms

_REMEDY = "Use an optimizer of keras.optimizers, which updates each rank's part"
_handles: list[Any] = []
# An attribute of a parameter that was a variable's until it was cut: the variable's path.
_REPLACED = "_unidist_replaced"
# Each element alone.
_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD),
)


def note_replaced(parameter: torch.Tensor, path: str) -> None:
    """To be called when a variable's parameter gives way to those of its ranks."""
    setattr(parameter, _REPLACED, path)


def watch() -> None:
    """Looks at every step of torch's optimizers, until `leave`."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_check))


def leave() -> None:
    while _handles:
        _handles.pop().remove()


def _check(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raises CapabilityError where a parameter is not what has the reduced gradient."""
    frame = context.frame()
    given = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    name = f"torch.optim.{type(optimizer).__name__}"
    for storage in list(sharded_norms.placed):
        if frame is None and storage.world.runs_several:
            continue  # the program has the whole, and its gradient
        for state in storage.states.values() if any(id(one) in given for one in storage.parameters()) else ():
            if storage.world.runs_several:
                raise CapabilityError(
                    f"{name} updates {storage.path!r} in the simulator, where it would do so once for each rank: "
                    f"{_REMEDY}, or run real processes"
                )
            if storage.shardings.state.layout.dims and type(optimizer) not in _ELEMENTWISE:
                raise CapabilityError(
                    f"{name} may look at the whole of {storage.path!r}, of which this process updates a part: {_REMEDY}"
                )
            if id(state) not in given:
                raise CapabilityError(
                    f"{name} was given {storage.path!r}, whose reduced gradient is on the part that this process "
                    f"updates: it would find none. {_REMEDY}, or keep states whole (zero=0)"
                )
    for one in given.values():
        if isinstance(one, seen.Value):
            raise CapabilityError(
                f"{name} was given {one!r}, which is cut among the ranks: its states would be whole. {_REMEDY}"
            )
        if (path := getattr(one, _REPLACED, None)) is not None:
            raise CapabilityError(
                f"{name} was given {path!r} before the model was distributed, and would update a tensor that "
                "it no longer uses. Make it afterwards, from model.parameters(): behind unidist.parallelize, or behind "
                f"the first call where layouts are found. Or: {_REMEDY}"
            )

"""Models with `jit_compile=True` that run eagerly, with the same numbers.

In the simulator ranks take turns, as no program does. A torch module in a model is called as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unidist.keras.patching.compat import TorchModuleWrapper, Trainer
from unidist.keras.patching.patches import Hook
from unidist.keras.records import layer_report
from unidist.keras.torch import context
from unidist.keras.torch.world import RankWorld

_SAID = "_unidist_said_eager"


def hooks() -> Iterator[Hook]:
    yield Hook(Trainer, "jit_compile", _of_ranks, "what cannot be a program runs eagerly")


def _of_ranks(original: property) -> property:
    """A model is not compiled where it is about to run eagerly."""

    of_original: Any = original.fget

    def jit_compile(self: Any) -> bool:
        engine = context.engine_at_work.get()
        return bool(of_original(self)) and not (engine is not None and engine.runs_eagerly)

    return property(jit_compile, original.fset, doc=original.__doc__)


def is_compiled(model: Any) -> bool:
    """Returns whether a model's steps run as programs, in a trainer's session."""
    return bool(getattr(model, "jit_compile", False))


def has_modules(model: Any) -> bool:
    return any(isinstance(layer, TorchModuleWrapper) for layer in model._flatten_layers())


def tell(model: Any, world: RankWorld) -> None:
    """Says once of a model that it runs eagerly, and why."""
    if not is_compiled(model) or _SAID in vars(model):
        return
    object.__setattr__(model, _SAID, True)
    if world.is_virtual:
        text = (
            f"the simulator runs model {model.name!r} eagerly, with the same numbers. Real processes compile it: "
            "use('torch')"
        )
    else:
        text = (
            f"model {model.name!r} has a torch module, so it runs eagerly, with the same numbers. Compile the module "
            "itself: torch.compile(module)"
        )
    layer_report.warn(f"jit_compile=True: {text}")

"""Knows which models need a replaced attribute: `Hook.needed`, where not every model needs it.

A layer, loss or metric of the user's own may call whatever there is, so it needs every one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidist.keras.layer_facts import is_of_either
from unidist.keras.patching.compat import INSIDE, BaseConv, LossScaleOptimizer, tree

Need = Callable[[Any], bool]


def own_code(model: Any) -> bool:
    """Returns whether a model runs code that is neither Keras's nor keras_hub's."""
    if model is None:
        return False
    parts = parts_of(model)
    functions = [getattr(part, name, None) for part in parts for name in ("_fn", "fn")]
    parts += filter(callable, functions)
    return not all(is_of_either(x if hasattr(x, "__name__") else type(x)) for x in parts)


def parts_of(model: Any) -> list[Any]:
    """Returns a model's layers, losses, metrics, functions among them, and its optimizers.

    They are what it was compiled with, and what its layers have.
    """
    compiled = getattr(model, "_compile_metrics", None)
    names = ("_user_metrics", "_user_weighted_metrics")
    given = [getattr(model, name, None) for name in ("loss", "optimizer")]
    found = [*tree.flatten([*given, *(getattr(compiled, name, None) for name in names)]), *model.metrics]
    for one in found:  # and those inside of them
        found += [*getattr(one, "_metrics", ()), *filter(None, [getattr(one, "inner_optimizer", None)])]
    return [*model._flatten_layers(), *(x for x in found if x is not None and not isinstance(x, str))]


def of_layers(is_one: Callable[[Any], bool]) -> Need:
    """The need of models that have such a layer."""
    return lambda model: model is not None and (own_code(model) or any(map(is_one, model._flatten_layers())))


def of_kinds(*names: str) -> Need:
    """Returns the need of models with layers of Keras's classes of these names, or derived from them."""
    return of_layers(lambda layer: any(kind.__name__ in names for kind in type(layer).__mro__))


def of_loss(name: str) -> Need:
    """The need of models whose loss is Keras's of this name."""

    def needed(model: Any) -> bool:
        if model is None:
            return False
        given = [x if isinstance(x, str) else type(x).__name__ for x in tree.flatten(getattr(model, "loss", None))]
        return own_code(model) or name.lower() in map(str.lower, given)

    return needed


def of_scaled_losses(model: Any) -> bool:
    """Returns whether a model's loss is scaled for float16."""
    return model is not None and isinstance(getattr(model, "optimizer", None), LossScaleOptimizer)


draws = of_layers(lambda layer: bool(getattr(layer, "_seed_generators", None)))
recomputes = of_layers(lambda layer: getattr(layer, "_remat_mode", None) is not None)
convolves = of_layers(lambda layer: isinstance(layer, BaseConv))
pools = of_kinds(*(f"{kind}MaxPooling{n}D" for kind in ("", "Adaptive") for n in (1, 2, 3)))
of_signals = of_kinds("FNetEncoder", "STFTSpectrogram", "MelSpectrogram")
of_images = of_layers(lambda layer: type(layer).__module__.startswith(f"{INSIDE}layers.preprocessing"))


def generates(model: Any) -> bool:
    """Returns whether a model is one of keras_hub's that write texts."""
    return hasattr(model, "generate")

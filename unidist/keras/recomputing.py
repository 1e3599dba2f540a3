"""Chooses the layers of a model that keep their inputs alone, and are computed again (`remat=`).

Keras's own rematerialization computes them again, on whichever backend.

Source of the method: Chen et al. 2016 (arXiv:1604.06174), of blocks; Korthikanti et al. 2022 (arXiv:2205.05198), of
attention alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import keras

from unidist.errors import ArgumentError, CapabilityError
from unidist.keras.layers import children
from unidist.keras.patching.compat import RematMode

# What `remat=` may be: "none", "block", "attention", or a function of a layer.
Remat = str | Callable[[Any], bool]
NAMES = ("none", "block", "attention")


def check(remat: Remat) -> None:
    """Checks the option as a strategy is made.

    Raises:
        ArgumentError: no such choice.
        CapabilityError: Keras's backend cannot compute layers again.
    """
    if not callable(remat) and remat not in NAMES:
        raise ArgumentError(f"remat={remat!r}: give one of {NAMES}, or a function of a layer that says whether")
    if remat != "none" and keras.config.backend() == "tensorflow":
        raise CapabilityError(
            f"remat={remat!r}: with Keras on 'tensorflow' a layer that draws or keeps state is not computed again as "
            "it was. Leave it out, or set KERAS_BACKEND=torch or jax before Keras is imported"
        )


def mark(model: Any, remat: Remat) -> None:
    """Lets the chosen layers of a built model be computed again in backward.

    Raises:
        CapabilityError: there is no such layer.
    """
    if remat == "none":
        return
    found = list(_chosen(model, remat))
    if not found:
        raise CapabilityError(
            f"remat={remat!r}: model {model.name!r} has no such layers. A block is a layer that holds others, and of "
            "whose class there are several side by side; attention is a layer whose class ends in 'Attention'. Give a "
            "function: remat=lambda layer: isinstance(layer, MyBlock)"
        )
    for layer in found:
        layer._remat_mode = RematMode("full", 0, ())


def marked(model: Any) -> Iterator[tuple[str, str]]:
    """Yields (path, what it does) of the layers that are computed again, whoever chose them."""
    for layer in model._flatten_layers():
        if getattr(layer, "_remat_mode", None) is not None:
            yield layer.path, "recomputed in backward: of its activations its inputs alone are kept"


def _chosen(parent: Any, remat: Remat) -> Iterator[Any]:
    within = children(parent)
    counts = Counter(type(child) for child in within if children(child) and child.weights)
    for child in within:
        if callable(remat):
            is_one = remat(child)
        elif remat == "block":
            is_one = counts[type(child)] > 1
        else:
            is_one = type(child).__name__.endswith("Attention")
        if is_one:
            yield child
        else:
            yield from _chosen(child, remat)

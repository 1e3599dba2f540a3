"""Chooses the layers of a model that keep their inputs alone, and are computed again (`remat=`).

Keras's own rematerialization computes them again, on whichever backend.

Source of the method: Chen et al. 2016 (arXiv:1604.06174), of blocks; Korthikanti et al. 2022 (arXiv:2205.05198), of
attention alone.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from unidist.errors import ArgumentError, CapabilityError
from unidist.keras.layers import children
from unidist.keras.patching.compat import RematMode

# What `remat=` may be: "none", "block", "attention", or a function of a layer.
Remat = str | Callable[[Any], bool]
NAMES = ("none", "block", "attention")
_ALL = RematMode("full", 0, ())


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
    for layer in chosen(model, remat):
        layer._remat_mode = _ALL


@contextlib.contextmanager
def marking(layers: Iterable[Any], mode: Any = _ALL) -> Iterator[None]:
    """Inside these layers are computed again in backward, or, with `mode` None, are not."""
    before = [(layer, layer._remat_mode) for layer in layers]
    for layer, _ in before:
        layer._remat_mode = mode
    try:
        yield
    finally:
        for layer, own in before:
            layer._remat_mode = own


def chosen(model: Any, remat: Remat) -> list[Any]:
    """Returns the layers that an option chooses.

    Raises:
        CapabilityError: there is no such layer.
    """
    if remat == "none":
        return []
    found = list(_chosen(model, remat))
    if not found:
        raise CapabilityError(
            f"remat={remat!r}: model {model.name!r} has no such layers. A block is a layer that holds others, and of "
            "whose class there are several side by side; attention is a layer whose class ends in 'Attention'. Give a "
            "function: remat=lambda layer: isinstance(layer, MyBlock)"
        )
    return found


def computes_all_again(layer: Any) -> bool:
    """Returns whether Keras computes all of a layer's call again in backward."""
    mode = getattr(layer, "_remat_mode", None)
    if mode is None:
        return False
    return mode.mode == "full" or (mode.mode == "list_of_layers" and layer.name in mode.layer_names)


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

"""A checkpoint's names for a model's variables, where Keras has counted on meanwhile.

Keras gives a layer without a name that of its class, and a number from the second on: "dense", "dense_1". A program
that makes its model again, as a notebook's cell does that runs twice, has "dense_2" and "dense_3" in their places.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from unidist.keras.compat import to_snake_case
from unidist.keras.states import optimizers

# Layers keep them without giving them a name.
_KEPT = ("seed_generator",)


def in_checkpoint(model: Any, ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    """The checkpoint's name for names of a model; empty where the weights are not those of the same layers.

    They are where names differ in automatic numbers alone, and none is left over. Of several such, the one of the
    lowest number is that of the lowest: layers are counted as they are made. What the user has named stays as it is.

    Args:
        ours: what each variable of the model is, by name: "model", "optimizer" or "state".
        theirs: the same, of the checkpoint.
    """
    automatic = frozenset(_automatic(model))
    weights = _paired(_of("model", ours), _of("model", theirs), automatic)
    if set(weights) != set(_of("model", ours)) or len(weights) != len(_of("model", theirs)):
        return {}
    states = _paired(_of("state", ours), _of("state", theirs), automatic)
    slots = _slots(_of("optimizer", ours), _of("optimizer", theirs), weights, automatic)
    found = {**weights, **states, **slots}
    # What was found for one must not be another's own name.
    return found if len({found.get(name, name) for name in ours}) == len(ours) else {}


def of_layers(model: Any, ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    """The checkpoint's name for names of layers: their own, or one that differs in automatic numbers alone."""
    mine, others = list(ours), set(theirs)
    if others.issuperset(mine):
        return {name: name for name in mine}
    found = _paired(mine, others, frozenset(_automatic(model)))
    left = {name: name for name in mine if name in others and name not in found and name not in found.values()}
    return {**found, **left}


def _of(kind: str, named: Mapping[str, str]) -> list[str]:
    return [name for name, its in named.items() if its == kind]


def _slots(ours: list[str], theirs: list[str], weights: Mapping[str, str], automatic: frozenset[str]) -> dict[str, str]:
    """The same for an optimizer's variables. One of a weight is called after it, with "_" for "/"."""
    owners = _paired({name.partition("/")[0] for name in ours}, {name.partition("/")[0] for name in theirs}, automatic)
    flat = {name.replace("/", "_"): there.replace("/", "_") for name, there in weights.items()}
    # The longest first: the name of one may begin that of another.
    longest = sorted(flat, key=len, reverse=True)
    found = {}
    for name in ours:
        owner, _, slot = name.partition("/")
        weight = next((one for one in longest if slot.startswith(f"{one}_")), "")
        there = f"{owners.get(owner, owner)}/{flat.get(weight, '')}{slot[len(weight) :]}"
        if there in theirs:
            found[name] = there
    return found


def _automatic(model: Any) -> Iterator[str]:
    """The names, without numbers, that Keras gives to parts of a model by their classes."""
    yield from _KEPT
    found = optimizers(model)
    inner = [one.inner_optimizer for one in found if hasattr(one, "inner_optimizer")]
    for part in (*model._flatten_layers(), *found, *inner):
        bare = to_snake_case(type(part).__name__)
        if re.fullmatch(rf"{re.escape(bare)}(_\d+)?", part.name):
            yield bare


def _paired(ours: Iterable[str], theirs: Iterable[str], automatic: frozenset[str]) -> dict[str, str]:
    """Their name for ours, where there are as many that differ in automatic numbers alone."""
    mine, others = _grouped(ours, automatic), _grouped(theirs, automatic)
    alike = [bare for bare, names in mine.items() if len(names) == len(others.get(bare, ()))]
    return {name: there for bare in alike for name, there in zip(mine[bare], others[bare], strict=True)}


def _grouped(names: Iterable[str], automatic: frozenset[str]) -> dict[tuple[str, ...], list[str]]:
    """Names that are the same without automatic numbers, in the order of these."""
    found: dict[tuple[str, ...], list[tuple[tuple[int, ...], str]]] = defaultdict(list)
    for name in names:
        parts = [_bare(part, automatic) for part in name.split("/")]
        found[tuple(bare for bare, _ in parts)].append((tuple(number for _, number in parts), name))
    return {bare: [name for _, name in sorted(several)] for bare, several in found.items()}


def _bare(part: str, automatic: frozenset[str]) -> tuple[str, int]:
    """A part of a path without its automatic number, and that; 0 for the first, which has none."""
    bare, _, number = part.rpartition("_")
    if bare in automatic and number.isdigit():
        return bare, int(number)
    return part, 0

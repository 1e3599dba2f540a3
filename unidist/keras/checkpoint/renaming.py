"""A checkpoint's names for a model's variables, where Keras has counted on meanwhile.

Keras gives a layer without a name that of its class, and a number from the second on: "dense", "dense_1". A program
that makes its model again, as a notebook's cell does that runs twice, has "dense_2" and "dense_3" in their places. And
`load_model` builds the layers of a config by themselves: "dense/kernel" for "sequential/dense/kernel".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unidist.keras.checkpoint.states import optimizers
from unidist.keras.patching.compat import to_snake_case

# Layers keep them without giving them a name.
_KEPT = ("seed_generator",)


def in_checkpoint(
    model: Any, ours: Mapping[str, str], theirs: Mapping[str, str], order: Sequence[str] = ()
) -> dict[str, str]:
    """Returns the checkpoint's name for names of a model; empty where the weights are of other layers.

    They are where names differ in automatic numbers alone, and none is left over. Of several such, the one of the
    lowest number is that of the lowest: layers are counted as they are made. What the user has named stays as it is.

    They are, too, where in the model's order each name has the parts of the other one, but for automatic numbers.

    Args:
        ours: what each variable of the model is, by name, in the model's order: "model", "optimizer" or "state".
        theirs: the same, of the checkpoint.
        order: the checkpoint's names in the order in which the model that was saved had them, where that is known.
    """
    automatic = frozenset(_automatic(model))
    mine, others = _of("model", ours), _of("model", theirs)
    weights, states = _paired(mine, others, automatic), _paired(_of("state", ours), _of("state", theirs), automatic)
    # Metrics come and go with what a model was asked.
    ordered = [name for name in order if name in theirs]
    own, there = _of("state", ours), [name for name in ordered if theirs[name] == "state"]
    if not _is_whole(weights, mine, others):
        weights = _in_order(mine, [name for name in ordered if theirs[name] == "model"], automatic)
    else:
        # From Keras 3.16 on a seed of a loaded model alone is called after its layer.
        taken = {*states.values(), *own}
        own = [name for name in own if name not in states and name not in theirs]
        there = [name for name in there if name not in taken]
    states |= _by_ends(own, there, automatic)
    if not _is_whole(weights, mine, others):
        return {}
    slots = _slots(_of("optimizer", ours), _of("optimizer", theirs), weights, automatic)
    found = {**weights, **states, **slots}
    # What was found for one must not be another's own name.
    return found if len({found.get(name, name) for name in ours}) == len(ours) else {}


def _is_whole(found: Mapping[str, str], ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return set(found) == set(ours) and len(found) == len(theirs)


def _in_order(ours: Sequence[str], theirs: Sequence[str], automatic: frozenset[str]) -> dict[str, str]:
    """Returns their name for ours, one after the other; empty where two are of different parts of a model."""
    pairs = list(zip(ours, theirs, strict=False))
    if len(ours) != len(theirs) or not all(_ends_alike(*pair, automatic) for pair in pairs):
        return {}
    return dict(pairs)


def _by_ends(ours: Sequence[str], theirs: Sequence[str], automatic: frozenset[str]) -> dict[str, str]:
    """The same for those whose last two parts are alike, where there are as many."""
    groups: dict[tuple[str, ...], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((ours, theirs)):
        for name in names:
            groups[tuple(_bare_parts(name, automatic)[-2:])][side].append(name)
    return {name: there for pair in groups.values() for name, there in _in_order(*pair, automatic).items()}


def _bare_parts(name: str, automatic: frozenset[str]) -> list[str]:
    return [_bare(part, automatic)[0] for part in name.partition("#")[0].split("/")]


def _ends_alike(one: str, other: str, automatic: frozenset[str]) -> bool:
    """Returns whether two paths end alike and one has all parts of the other, but automatic numbers.

    The parts are in one order.

    What `load_model` builds by itself lacks the first part, or a wrapper's in the middle.
    """
    short, long = sorted((_bare_parts(one, automatic), _bare_parts(other, automatic)), key=len)
    left = iter(long)
    return short[-1] == long[-1] and all(part in left for part in short)


def of_layers(model: Any, ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    """Returns the checkpoint's name for names of layers: their own, or one with other automatic numbers."""
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

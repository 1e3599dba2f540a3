"""Fetching: how often a step gathers variables that are stored in parts over the data axes (ZeRO-3).

Each engine fetches what a layer needs when it is called, and again where backward needs its value. With Keras on torch
neighbouring layers are fetched together, in units; the unit that was needed next in the step before is fetched ahead
and stays; nothing is fetched again that is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

# Of variables that are fetched together: a unit takes no further layer from so many on.
UNIT_BYTES = 8 << 20


class Member(NamedTuple):
    """A variable that is fetched; those of one `kind` may share a unit."""

    number: int
    kind: Hashable
    bytes: int


def units(layers: Iterable[Sequence[Member]], most: int) -> dict[int, int]:
    """Returns the unit of each variable, by its number.

    Small neighbours share one, each of whole layers and of one kind.

    Args:
        layers: the variables of each.
        most: bytes from which on a unit takes no further layer.
    """
    found: dict[int, int] = {}
    sizes: list[int] = []
    taking: dict[Hashable, int] = {}
    for members in layers:
        for member in members:
            if member.kind not in taking:
                taking[member.kind] = len(sizes)
                sizes.append(0)
            found[member.number] = taking[member.kind]
            sizes[taking[member.kind]] += member.bytes
        for kind in {member.kind for member in members}:
            if sizes[taking[kind]] >= most:
                del taking[kind]
    return found


def by_reads(layers: Sequence[Sequence[Hashable]], reads: Sequence[Hashable]) -> list[int]:
    """Sorts layers by the first read of any of their variables, and returns their numbers.

    Those that are not read come last, in the order that they had.
    """
    first: dict[Hashable, int] = {}
    for k, variable in enumerate(reads):
        first.setdefault(variable, k)
    never = len(reads)
    return sorted(range(len(layers)), key=lambda n: min((first.get(v, never) for v in layers[n]), default=never))


def fetches(forward: Iterable[int], backward: Iterable[int]) -> Counter[int]:
    """Unit -> how often a step fetches it.

    Args:
        forward, backward: the units in the order in which the passes need them.
    """
    needed: list[int] = []
    for unit in (*forward, *backward):
        if not needed or needed[-1] != unit:
            needed.append(unit)
    counts: Counter[int] = Counter()
    here: set[int] = set()
    for unit, following in zip(needed, [*needed[1:], *needed[-1:]], strict=True):
        here &= {unit, following}
        counts.update({unit, following} - here)
        here = {unit, following}
    return counts

"""Says which devices a compiled collective joins: the ways in which XLA writes replica groups.

    {{0,1},{2,3}}                                   listed; {} is all devices
    [2,4]<=[8]   [2,4]<=[4,2]T(1,0)                 numbers 0 to 7 shaped, transposed, shaped again: a group a row
    mesh['a'=2,'b'=4] {'b'}                         the groups along axes of a mesh of the devices in order
    mesh['a'=2,'b'=4] {'b':(2)2}                    along part of an axis: (what is major to it in the axis), its size
    mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}       of a mesh of devices in another order, or a list of them

The numbers are places in the program's device assignment, which for a jitted function is its mesh in row-major order.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=@?mesh[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}"
)
_AXIS = re.compile(r"['\"]?([\w.\-]+)['\"]?=(\d+)")
_PART = re.compile(r"['\"]?([\w.\-]+)['\"]?(?::\((\d+)\)(\d+))?")
_SHAPED = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d,\s]*\},?\s*)*)\}")


def groups_of(attributes: str, device_count: int) -> Groups:
    """The groups of a collective from what follows its operands. Without any: all devices together.

    Raises:
        ValueError: replica_groups is written in a way that is not known here.
    """
    if (listed := _LISTED.search(attributes)) is not None:
        return _listed(listed[1]) or (tuple(range(device_count)),)
    if (iota := _IOTA.search(attributes)) is not None:
        return _rows(_iota(_numbers(iota[2]), _numbers(iota[3])).reshape(_numbers(iota[1])))
    if (mesh := _MESH.search(attributes)) is not None:
        return _along_axes(mesh[1], mesh[2], mesh[3])
    if "replica_groups" in attributes:
        start = attributes.index("replica_groups")
        raise ValueError(f"unknown form of replica groups in compiled HLO: {attributes[start : start + 200]!r}")
    return (tuple(range(device_count)),)


def pairs_of(attributes: str) -> Groups:
    """The (source, target) pairs of a collective-permute."""
    found = _PAIRS.search(attributes)
    return () if found is None else _listed(found[1])


def _listed(text: str) -> Groups:
    return tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]*)\}", text))


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text or ""))


def _iota(shape: tuple[int, ...], order: tuple[int, ...]) -> npt.NDArray[np.int64]:
    numbers = np.arange(prod(shape)).reshape(shape)
    return numbers.transpose(order) if order else numbers


def _rows(table: npt.NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in table)


def _along_axes(axes: str, device_ids: str | None, parts: str) -> Groups:
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    chosen = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in _PART.findall(parts)]
    shape: list[int] = []
    places: dict[tuple[str, int], int] = {}
    for name, whole in sizes.items():
        bounds = {1, whole} | {b for n, before, size in chosen if n == name for b in (before, before * size)}
        ordered = sorted(bounds) if whole > 1 else [1, 1]
        for low, high in pairwise(ordered):
            places[name, low] = len(shape)
            shape.append(high // low)
    grid = _devices(device_ids, prod(sizes.values())).reshape(shape)
    minor = [places[n, low] for n, before, size in chosen for low in _within(places, n, before, before * size)]
    major = [place for place in range(len(shape)) if place not in minor]
    return _rows(grid.transpose(major + minor).reshape(-1, prod(shape[place] for place in minor)))


def _within(places: dict[tuple[str, int], int], name: str, low: int, high: int) -> list[int]:
    """Returns where the pieces of an axis begin between two bounds; an axis of size 1 has one."""
    return [begin for other, begin in places if other == name and (low <= begin < high or low == high == begin)]


def _devices(device_ids: str | None, count: int) -> npt.NDArray[np.int64]:
    if not device_ids:
        return np.arange(count)
    shaped = _SHAPED.match(device_ids.strip())
    if shaped is None:
        return np.array(_numbers(device_ids))
    source = _numbers(shaped[2]) or _numbers(shaped[1])
    return _iota(source, _numbers(shaped[3])).reshape(-1)

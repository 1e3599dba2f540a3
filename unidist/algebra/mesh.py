"""Mesh: the devices of a world arranged on named axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from unidist import names
from unidist.algebra.checks import fields_of, whole_number
from unidist.errors import MeshError

Axes = tuple[str, ...]
MOST_DEVICES = 1 << 20

# The names of the world's devices in rank order. The registry sets it; the algebra stays free of backends.
_world: Callable[[], Sequence[str]] | None = None


def set_world(devices: Callable[[], Sequence[str]] | None) -> None:
    """Sets where a Mesh looks up device names and the number of devices."""
    global _world
    _world = devices


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that take part in one collective, in the order of their places, and this rank's place."""

    ranks: tuple[int, ...]
    index: int
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))


@dataclass(frozen=True, init=False)
class Mesh:
    """The devices of a world on named axes, major to minor.

    Args:
        axes: name -> size in the order major to minor. One size may be -1: what is left of the devices.
        devices: the name or rank of the device at each row-major place, in any order. By default the first
            ranks of the world in their order.

    Raises:
        MeshError: a size below 1, no or repeated names, devices that do not fill the mesh or come twice; more than
            MOST_DEVICES places.

    Example:
        >>> from unidist import Mesh
        >>> mesh = Mesh({"data": 2, "model": 2})
        >>> mesh.size, mesh.coordinate(3)
        (4, {'data': 1, 'model': 1})
        >>> mesh.groups("model")
        ((0, 1), (2, 3))
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int], devices: Iterable[int | str] | None = None) -> None:
        ranks = None if devices is None else _ranks_of(devices)
        sizes = _resolved(_named(axes), None if ranks is None else len(ranks))
        count = prod(sizes.values())
        if count > MOST_DEVICES:
            raise MeshError(
                f"mesh {sizes} has {count} places, more than the {MOST_DEVICES} that a mesh may have: a size is a "
                "number of devices along its axis"
            )
        if ranks is None:
            ranks = tuple(range(count))
        if len(ranks) != count:
            raise MeshError(
                f"mesh {sizes} has {count} places, but {len(ranks)} devices were given: give one device for each place"
            )
        if len(set(ranks)) != len(ranks):
            raise MeshError(f"mesh {sizes}: a device is given twice in {list(ranks)}")
        object.__setattr__(self, "axes", tuple(sizes.items()))
        object.__setattr__(self, "devices", ranks)

    def __repr__(self) -> str:
        order = "" if self.devices == tuple(range(self.size)) else f", devices={list(self.devices)}"
        return f"Mesh({dict(self.axes)}{order})"

    def _repr_svg_(self) -> str | None:
        return names.shown(self, "svg")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.devices))

    def __getstate__(self) -> dict[str, Any]:
        return fields_of(self)

    @cached_property
    def axis_names(self) -> Axes:
        """In the order major to minor."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis, in their order."""
        return tuple(size for _, size in self.axes)

    @cached_property
    def size(self) -> int:
        """The number of devices."""
        return prod(self.shape)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.devices)}

    def axis_size(self, axes: str | Axes) -> int:
        """The number of places along one axis, or along several together."""
        return prod(self._sizes[axis] for axis in self.check_axes(axes))

    def check_axes(self, axes: str | Axes | None) -> Axes:
        """The axes as a tuple (None: all of them). Raises MeshError for an unknown or repeated one."""
        if axes is None:
            return self.axis_names
        names = (axes,) if isinstance(axes, str) or not isinstance(axes, Iterable) else tuple(axes)
        for name in names:
            if not isinstance(name, str):
                raise MeshError(f"an axis is named by a string, found {name!r}: the mesh has {dict(self.axes)}")
            if name not in self._sizes:
                raise MeshError(f"unknown axis {name!r}: the mesh has {dict(self.axes)}")
        if len(set(names)) != len(names):
            raise MeshError(f"an axis is named twice in {names}")
        return names

    def coordinate(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis. Raises MeshError if the rank is not in the mesh."""
        place = self._places.get(rank)
        if place is None:
            raise MeshError(f"rank {rank} is not in {self}")
        coordinate = {}
        for name, size in reversed(self.axes):
            place, coordinate[name] = divmod(place, size)
        return dict(reversed(coordinate.items()))

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate (every axis named). Raises MeshError where the mesh has no such place."""
        place = 0
        for name, size in self.axes:
            here = coordinate.get(name, -1)
            if not 0 <= here < size:
                raise MeshError(f"{self} has no place {dict(coordinate)}: name a place of each axis, from 0")
            place = place * size + here
        return self.devices[place]

    def group(self, axes: str | Axes | None, rank: int) -> Group:
        """The ranks that differ from `rank` only along `axes`, ordered by `axes` major to minor."""
        return _group(self, self.check_axes(axes), rank)

    def groups(self, axes: str | Axes | None) -> tuple[tuple[int, ...], ...]:
        """All groups along `axes`, each once, in mesh order of their first rank."""
        names = self.check_axes(axes)
        return tuple(dict.fromkeys(self.group(names, rank).ranks for rank in self.devices))


def _group(mesh: Mesh, axes: Axes, rank: int) -> Group:
    cache: dict[tuple[Axes, int], Group] = mesh.__dict__.setdefault("_groups", {})
    found = cache.get((axes, rank))
    if found is None:
        here = mesh.coordinate(rank)
        ranks, index = [], 0
        for k in range(mesh.axis_size(axes)):
            there, rest = dict(here), k
            for axis in reversed(axes):
                rest, there[axis] = divmod(rest, mesh.axis_size(axis))
            ranks.append(mesh.rank_at(there))
            if there == here:
                index = k
        found = cache[axes, rank] = Group(tuple(ranks), index)
    return found


def _ranks_of(devices: Iterable[int | str]) -> tuple[int, ...]:
    if not isinstance(devices, Iterable) or isinstance(devices, str):
        raise MeshError(f"devices must be a list of names or ranks, one for each place of the mesh, found {devices!r}")
    ranks = []
    for device in devices:
        if isinstance(device, str):
            names = list(_world()) if _world is not None else []
            if device not in names:
                raise MeshError(
                    f"unknown device {device!r}: "
                    + (f"the world has {names}" if names else "choose a backend first: unidist.use(...)")
                )
            ranks.append(names.index(device))
        else:
            rank = whole_number(device)
            if rank is None or rank < 0:
                raise MeshError(f"a device must be a name or a rank from 0, found {device!r}")
            ranks.append(rank)
    return tuple(ranks)


def _named(axes: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    try:
        pairs = [(name, size) for name, size in (axes.items() if isinstance(axes, Mapping) else axes)]
    except (TypeError, ValueError):
        raise MeshError(f"a mesh is made of names and sizes, as {{'data': 2, 'model': 4}}, found {axes!r}") from None
    for name, size in pairs:
        if not isinstance(name, str) or not name:
            raise MeshError(f"an axis name must be a non-empty string, found {name!r}")
        if name in sizes:
            raise MeshError(f"axis {name!r} is named twice in {axes}: each axis has a name of its own")
        number = whole_number(size)
        if number is None or (number < 1 and number != -1):
            raise MeshError(f"axis {name!r} has size {size!r}: it must be a whole number from 1, or -1 for the rest")
        sizes[name] = number
    return sizes


def _resolved(sizes: dict[str, int], count: int | None) -> dict[str, int]:
    if not sizes:
        raise MeshError("a mesh needs at least one axis, for example Mesh({'data': -1})")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise MeshError(f"only one size may be -1, found {open_axes}")
    if open_axes:
        if count is None:
            if _world is None:
                raise MeshError(
                    f"axis {open_axes[0]!r} is -1, but the number of devices is unknown: "
                    "choose a backend first with unidist.use(...), or give devices="
                )
            count = len(_world())
        known = prod(size for size in sizes.values() if size != -1)
        if count % known or count < known:
            raise MeshError(f"{count} devices cannot fill {sizes}: {known} does not divide {count}")
        sizes[open_axes[0]] = count // known
    return sizes


def parse_mesh(text: str) -> dict[str, int]:
    """{"data": 2, "model": 2} of "data=2,model=2". Raises MeshError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (p.strip() for p in part.partition("="))
        if not axis or axis in sizes or not size.isdigit() or int(size) < 1:
            raise MeshError(f"--mesh {text!r}: write axes and sizes, each once, as data=2,model=2")
        sizes[axis] = int(size)
    return sizes

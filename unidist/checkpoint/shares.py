"""Shares the rows of a tensor among processes that write: each byte once, in contiguous ranges.

Rows are counted along the first dim of more than one entry: a range of them is a range of bytes. Axes that cut this dim
leave each rank such a range. Axes that cut a later dim leave it columns; the ranks along them, a *team*, exchange rows
for columns first, piece by piece. Replicas share the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from unidist.algebra import Axes, Layout, Mesh, Sharding, chunk
from unidist.checkpoint.regions import rows_dim

# A tensor below this is written by one process.
SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a tensor.

    Attributes:
        team: the ranks that hold them together.
    """

    start: int
    stop: int
    team: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """The part of a tensor that one process writes.

    Args:
        sharding: how the tensor is stored; no axis is partial.
        processes: the ranks of each process, by its place.
        place: of the process.
        itemsize: bytes of an entry.
        number: of the tensor; small ones go to the processes in turns.
        buffer: bytes of a piece.

    Example:
        >>> from unidist import Layout, Mesh
        >>> from unidist.algebra import Sharding
        >>> rows = Sharding(Mesh({"model": 2}), Layout("model"), (4, 3))
        >>> list(Share(rows, ((0,), (1,)), 1, itemsize=1 << 20, number=0).pieces())
        [Piece(start=2, stop=4, team=(1,))]
        >>> columns = Sharding(Mesh({"model": 2}), Layout(None, "model"), (4, 3))
        >>> share = Share(columns, ((0,), (1,)), 1, itemsize=1 << 20, number=0)
        >>> share.is_exchanged, list(share.pieces())
        (True, [Piece(start=0, stop=4, team=(0, 1))])
    """

    sharding: Sharding
    processes: tuple[tuple[int, ...], ...]
    place: int
    itemsize: int
    number: int
    buffer: int = 64 << 20

    @property
    def dim(self) -> int:
        """The dim of the rows; 0 where no dim has more than one entry."""
        return rows_dim(self.sharding.shape)

    @cached_property
    def inner(self) -> Axes:
        """The axes that cut a dim behind that of the rows."""
        return tuple(axis for axes in self.sharding.layout.dims[self.dim + 1 :] for axis in axes)

    @property
    def row_bytes(self) -> int:
        return prod(self.sharding.shape[self.dim + 1 :]) * self.itemsize

    @cached_property
    def is_exchanged(self) -> bool:
        """Is true where some rows are in no process that could write them alone."""
        return any(not self._alone(teams) for _, teams in self._groups)

    def pieces(self) -> Iterator[Piece]:
        """Yields the pieces in which this process takes part.

        Where rows are exchanged, the others of the team take part, and each of its ranks writes its part of them. Else
        this process holds them and writes all.
        """
        if self.is_exchanged:
            yield from self._exchanged()
            return
        small = prod(self.sharding.shape) * self.itemsize < SMALL_BYTES
        for (start, length), teams in self._groups:
            alone = self._alone(teams)
            writers = sorted(alone)
            if small:
                writers = [writers[self.number % len(writers)]]
            if self.place in writers:
                offset, own = chunk(length, len(writers))[writers.index(self.place)]
                for lo, hi in self._cut(start + offset, own):
                    yield Piece(lo, hi, alone[self.place])

    def _exchanged(self) -> Iterator[Piece]:
        own = set(self.processes[self.place])
        for (start, length), teams in self._groups:
            for k, (lo, hi) in enumerate(self._cut(start, length)):
                team = teams[(k + self.number) % len(teams)]
                if own.intersection(team):
                    yield Piece(lo, hi, team)

    def together(self) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Yields (start, stop, the ranks that write) of exchanges in which all ranks take part at once.

        Each counts rows from the first that it holds: as many on each.
        """
        length = max((n for (_, n), _ in self._groups), default=0)
        for k, (lo, hi) in enumerate(self._cut(0, length)):
            yield lo, hi, frozenset(r for _, teams in self._groups for r in teams[(k + self.number) % len(teams)])

    def _cut(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        step = max(1, self.buffer // max(self.row_bytes, 1))
        for lo in range(start, start + length, step):
            yield lo, min(lo + step, start + length)

    @cached_property
    def _groups(self) -> tuple[tuple[tuple[int, int], list[tuple[int, ...]]], ...]:
        if not prod(self.sharding.shape):
            return ()
        mesh, shape = self.sharding.mesh, self.sharding.shape
        held: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for team in mesh.groups(self.inner) if self.inner else [(rank,) for rank in mesh.devices]:
            region = self.sharding.region(team[0])
            # An axis may cut a dim of one entry: only its first place has it.
            if shape and not all(n for _, n in region[: self.dim + 1]):
                continue
            held.setdefault(region[self.dim] if shape else (0, 1), []).append(team)
        return tuple(sorted(held.items()))

    def _alone(self, teams: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """process -> a team that is within it."""
        found: dict[int, tuple[int, ...]] = {}
        for team in teams:
            for place, ranks in enumerate(self.processes):
                if set(team) <= set(ranks):
                    found.setdefault(place, team)
        return found

    def exchange(self, mesh: Mesh, rows: int) -> tuple[Sharding, Sharding]:
        """(source, target) of an exchange of rows: from cut along later dims to cut along that of the rows.

        The axes that cut the rows already are left out: each team works on rows of its own.

        Args:
            mesh: the tensor's, or one of a team and the inner axes.
        """
        shape = self.sharding.shape
        dims = [[a for a in self.sharding.layout.dim_axes(k) if a in self.inner] for k in range(self.dim, len(shape))]
        piece = (*shape[: self.dim], rows, *shape[self.dim + 1 :])
        none = [None] * self.dim
        source = Layout(*none, *(tuple(axes) or None for axes in dims))
        return Sharding(mesh, source, piece), Sharding(mesh, Layout(*none, self.inner), piece)

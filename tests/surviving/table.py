"""The table of faults: what may happen, where, on what; and some cells of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

BACKENDS = ("torch", "jax", "tensorflow", "horovod")
WORLDS = ("2", "2x2", "two hosts")
# "exit 0": as a program that takes itself for done.
ENDS = ("SIGKILL", "SIGSTOP", "SIGTERM", "launcher SIGTERM", "launcher SIGKILL", "exit 0")
RAISED = ("exception", "MemoryError")
PLACES = ("joining", "first step", "forward", "between steps", "evaluating", "saving", "loading", "last step")
# The launcher of a node is killed: the others go on without it, and with it when it comes back.
GONE, BACK = LOSES_A_NODE = "node gone", "node back"
# Where each rank draws its own numbers, fewer ranks draw others: trainings that go on with fewer have no dropout there.
DRAWS_APART = ("torch", "tensorflow", "horovod")


@dataclass(frozen=True, slots=True)
class Cell:
    """Something that happens to a run."""

    fault: str
    place: str
    backend: str
    world: str
    rank: int = 1
    asynchronous: bool = False
    in_memory: bool = False
    dropout: bool = True

    def __str__(self) -> str:
        where = f"{self.world}{' in memory' if self.in_memory else ''}"
        return f"{self.backend}, {where}: {self.fault} of rank {self.rank} in {self.place}"

    @property
    def processes(self) -> int:
        return 4 if self.world == "2x2" and self.backend in ("torch", "horovod") else 2

    @property
    def devices(self) -> int | None:
        """Of each process; None: one."""
        return 2 if self.world == "2x2" and self.processes == 2 else None


def cells() -> Iterator[Cell]:
    """The whole table."""
    for backend, world in product(BACKENDS, WORLDS):
        for fault, place in pairs():
            if (fault, place) == ("exception", "forward") or (backend == "horovod" and world == "2x2"):
                continue
            yield Cell(fault, place, backend, world)
        if world == "two hosts":
            yield Cell("link cut", "between steps", backend, world)
            yield Cell("link slow", "between steps", backend, world)
            for place in ("first step", "forward", "between steps", "evaluating", "saving", "last step"):
                yield Cell(GONE, place, backend, world, dropout=backend not in DRAWS_APART)
            yield Cell(BACK, "between steps", backend, world, dropout=backend not in DRAWS_APART)
            yield Cell(BACK, "copying", backend, world, in_memory=True, dropout=backend not in DRAWS_APART)
        if world != "2x2":
            yield from in_memory(backend, world)


def in_memory(backend: str, world: str) -> Iterator[Cell]:
    """Trainings that go on from their nodes' memory: on two hosts from that of the other one, where one is lost."""
    faults = ("SIGKILL", "exception", *(("launcher SIGKILL",) if world == "two hosts" else ()))
    for fault, place in product(faults, ("forward", "between steps", "evaluating", "copying", "loading")):
        if (fault, place) != ("exception", "forward"):
            yield Cell(fault, place, backend, world, in_memory=True)


def pairs() -> Iterator[tuple[str, str]]:
    """(fault, place): an exception in a thread beside the step is none of the step."""
    yield from product(ENDS, PLACES)
    yield from ((fault, place) for fault, place in product(RAISED, PLACES) if place != "forward")
    yield from (("exception", "data"), ("loop", "between steps"), ("loop", "evaluating"), ("disk full", "saving"))


def sample(
    count: int, seed: int, worlds: Sequence[str] = ("2", "two hosts"), without: Sequence[str] = ()
) -> list[Cell]:
    """So many cells, such that backends, faults and places come as evenly as may be. `without`: faults left out."""
    rng = random.Random(seed)
    left = [cell for cell in cells() if cell.world in worlds and cell.fault not in without]
    rng.shuffle(left)
    chosen: list[Cell] = []
    while len(chosen) < count:

        def told(cell: Cell) -> int:
            return sum(
                (one.backend == cell.backend) + 2 * (one.fault == cell.fault) + (one.place == cell.place)
                for one in chosen
            )

        best = min(left, key=told)
        left.remove(best)
        chosen.append(best)
    return chosen

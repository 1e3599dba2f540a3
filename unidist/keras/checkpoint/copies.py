"""Keeps a training's steps in its nodes' memory: written often, read where processes start again.

Each process copies what it would write into files into memory that the launcher keeps, and sends it to a process of the
next node, in a ring: what a lost node had is at another one. Started again, the processes agree on the latest step all
of whose parts are in some node. Each takes from its own node's memory what it stores, and gets the rest by broadcasts.

Source of the method: Gemini, "Fast Failure Recovery in Distributed Training with In-Memory Checkpoints" (SOSP 2023),
whose ring placement this is, with two copies.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unidist.backends.environment import RESTARTS, NodeMemory
from unidist.checkpoint.memory import BLOCK, Key, Part, Slot, parts_in
from unidist.checkpoint.stores import is_address
from unidist.errors import CapabilityError
from unidist.flight.recorder import recorder
from unidist.keras import seeds
from unidist.keras.checkpoint import layer_assets
from unidist.keras.checkpoint.fetching import PURPOSE, Line, Source
from unidist.keras.checkpoint.states import State, agree, tried
from unidist.keras.consistency.processes import Processes

_log = logging.getLogger(__name__)
# Bytes that are sent at once: a process holds them twice.
_CHUNK = 4 << 20
_NONE = -1


@dataclass(frozen=True)
class Nodes:
    """Says which processes share a node's memory.

    Attributes:
        of: each process's node, by place.

    Example:
        >>> nodes = Nodes((7, 7, 9, 9))
        >>> nodes.pairs
        ((0, 2), (1, 3), (2, 0), (3, 1))
    """

    of: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """Each node once, in the order of its first process."""
        return tuple(dict.fromkeys(self.of))

    def places(self, node: int) -> list[int]:
        return [place for place, one in enumerate(self.of) if one == node]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(place, the place on the next node that keeps its copy).

        Raises:
            CapabilityError: nodes have different numbers of processes.
        """
        groups = [self.places(node) for node in self.all]
        if len({len(group) for group in groups}) > 1:
            counts = ", ".join(str(len(group)) for group in groups)
            raise CapabilityError(
                f"Checkpoint(memory_every=...) needs as many processes on each node; the nodes have {counts}"
            )
        shifted = [*groups[1:], groups[0]]
        return tuple(sorted(pair for a, b in zip(groups, shifted, strict=True) for pair in zip(a, b, strict=True)))


class Copies:
    """The steps of one training in memory. All methods are collectives of its processes.

    Args:
        directory: of the training's checkpoints on the disk.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory if is_address(directory) else str(Path(directory).absolute())
        self._memory = NodeMemory.read()
        self._found: Key | None = None
        self._slot: Slot | None = None
        self._nodes: Nodes | None = None
        self._is_off = False

    def close(self) -> None:
        if self._slot is not None:
            self._slot.close()

    def find(self, holders: Processes, newer_than: int) -> Source | None:
        """The latest step whose parts are all in memory, if it is newer than that on the disk."""
        if (nodes := self._known(holders)) is None or self._memory is None:
            return None
        own = [part for part in parts_in(self._memory.paths) if part.key.directory == self._directory]
        held = _of_nodes(Line(holders), nodes, own, self._directory)
        found = _latest(held)
        if found is None or found.step <= newer_than:
            return None
        self._found = found
        places = {place: [node for node in nodes.all if (found, place) in held[node]] for place in range(found.count)}
        mine = {part.place: part for part in own if part.key == found}
        return Source(found.step, holders, nodes.of, places, mine)

    @recorder.phase("saving")
    def save(self, model: Any, step: int, facts: dict[str, Any]) -> None:
        """Copies a step.

        Raises:
            CheckpointError: on all, where one could not.
        """
        state = layer_assets.with_kept(State.of(model))
        if (nodes := self._known(state.holders)) is None or self._memory is None:
            return
        if self._slot is None:
            place = state.holders.place
            self._slot = Slot(self._memory.of(nodes.places(nodes.of[place]).index(place)), self._found)
        self._copy(state, self._slot, step, {"unidist": {"random": seeds.state().decode()}, "facts": facts}, nodes)
        recorder.committed(step)

    def _copy(self, state: State, slot: Slot, step: int, facts: dict[str, Any], nodes: Nodes) -> None:
        holders, what = state.holders, f"keep step {step} in memory"
        key = Key(step, int(os.environ.get(RESTARTS, "0")), self._directory, holders.count)
        failure = state.bring(slot.write, tried(slot.begin))
        failure = failure or tried(lambda: slot.finish(key, holders.place, state.files, facts))
        if len(nodes.all) > 1:
            agree(holders, failure, what)
            failure = tried(lambda: _exchange(Line(holders), nodes, slot))
        agree(holders, failure or tried(slot.stand), what)

    def _known(self, holders: Processes) -> Nodes | None:
        if self._is_off:
            return None
        if self._nodes is not None and len(self._nodes.of) == holders.count:
            return self._nodes
        node = _NONE if self._memory is None else self._memory.node
        found = holders.of_all(node, PURPOSE)
        if _NONE in found:
            if holders.place == 0:
                _log.warning(
                    "memory_every has no effect: nothing outlives these processes. `unidist run --max-restarts N` "
                    "on Linux keeps their steps in memory"
                )
            self._is_off = True
            return None
        self._nodes = Nodes(found)
        return self._nodes


def _of_nodes(line: Line, nodes: Nodes, own: Sequence[Part], directory: str) -> dict[int, list[tuple[Key, int]]]:
    """Returns (step, place) of all parts of each node, as its first process finds them.

    The directory may be another path on each node.
    """
    told = json.dumps([[part.key.step, part.key.attempt, part.key.count, part.place] for part in own]).encode()
    found = {}
    for node in nodes.all:
        rows = json.loads(line.bytes_of_place(nodes.places(node)[0], told))
        found[node] = [(Key(step, attempt, directory, count), place) for step, attempt, count, place in rows]
    return found


def _latest(held: dict[int, list[tuple[Key, int]]]) -> Key | None:
    have: dict[Key, set[int]] = {}
    for parts in held.values():
        for key, place in parts:
            have.setdefault(key, set()).add(place)
    whole = [key for key, places in have.items() if len(places) == key.count]
    return max(whole, key=lambda key: (key.step, key.attempt), default=None)


def _exchange(line: Line, nodes: Nodes, slot: Slot) -> None:
    of_all = line.processes.of_all(slot.blocks, PURPOSE)
    source = next(a for a, b in nodes.pairs if b == line.processes.place)
    most = max(of_all) * BLOCK
    chunk = min(_CHUNK, 1 << (most - 1).bit_length())
    for begin in range(0, most, chunk):
        given = np.zeros(chunk, np.uint8)
        slot.own(begin, given)
        came = line.sent(given.view(np.int32), nodes.pairs).view(np.uint8)
        slot.keep(begin, came, of_all[source])

"""A step that the nodes keep in their memory: read after a node is lost, on any mesh, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parity import checkpoints
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, DATA_4, GRID, MODEL_2, MODEL_4, SETTINGS, Worlds
from unidist.backends.environment import MEMORY, NodeMemory
from unidist.checkpoint.memory import parts_in
from unidist.launch.run import Memory

pytestmark = pytest.mark.processes
_GRID_3 = replace(GRID, zero=3)


class Nodes:
    """Launchers' memory, without launchers."""

    def __init__(self, count: int, processes: int) -> None:
        self._each = processes // count
        self._memories = [Memory(processes) for _ in range(count)]

    @property
    def said(self) -> list[str]:
        """To each process."""
        return [memory.variables[MEMORY] for memory in self._memories for _ in range(self._each)]

    def lose(self, node: int) -> None:
        """Another launcher takes its place."""
        lost = self._memories[node]
        self._memories[node] = Memory(len(lost._files) // 2)
        lost.close()

    def parts(self, node: int) -> list[int]:
        """Places whose parts are in a node's memory."""
        memory = NodeMemory.read(self._memories[node].variables)
        assert memory is not None
        return sorted(part.place for part in parts_in(memory.paths))

    def close(self) -> None:
        for memory in self._memories:
            memory.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def _is_right(found: tuple[int, Any, dict[str, Any]] | None, setting: str, step: int = 7) -> None:
    assert found is not None
    number, facts, values = found
    assert (number, facts) == (step, {"note": step})
    checkpoints.assert_known(values, setting)


@pytest.mark.parametrize(
    ("setting", "spec", "other"),
    [
        ("torch-4", DATA_4, MODEL_4),
        ("torch-4", _GRID_3, DATA_4),
        ("jax-2x2", MODEL_4, GRID),
        ("tensorflow-2x2", GRID, MODEL_4),
        ("horovod-2", replace(DATA_2, zero=3), MODEL_2),
        ("horovod-2-tensorflow", DATA_2, DATA_2),
    ],
)
def test_a_lost_node_is_in_the_memory_of_the_next(
    setting: str, spec: Spec, other: Spec, worlds: Worlds, stack: ExitStack
) -> None:
    processes = SETTINGS[setting].processes
    nodes = stack.enter_context(closing(Nodes(2, processes)))
    world = worlds.get(setting)
    for written, sent in world.call("tests.parity.memory:keep", nodes.said, "here", spec, [5, 7]):
        assert written
        assert sent["permute"] >= written
    assert nodes.parts(0) == sorted([*range(processes)] * 2)
    # All nodes are there, on another mesh; the disk has a step that is older.
    for found in world.call("tests.parity.memory:take", nodes.said, "here", other, 6):
        _is_right(found, setting)
    nodes.lose(0)
    for found in world.call("tests.parity.memory:take", nodes.said, "here", spec):
        _is_right(found, setting)
    # Not newer than what is on the disk; of another training.
    assert world.call("tests.parity.memory:take", nodes.said, "here", spec, 7) == [None] * processes
    assert world.call("tests.parity.memory:take", nodes.said, "elsewhere", spec) == [None] * processes


def test_four_nodes_lose_one_and_two(worlds: Worlds, stack: ExitStack) -> None:
    """Each has its own part and that of one other: two that follow each other may not be lost."""
    nodes = stack.enter_context(closing(Nodes(4, 4)))
    world, spec = worlds.get("torch-4"), replace(DATA_4, zero=3)
    world.call("tests.parity.memory:keep", nodes.said, "here", spec, [7])
    assert [nodes.parts(node) for node in range(4)] == [[0, 3], [0, 1], [1, 2], [2, 3]]
    nodes.lose(2)
    nodes.lose(0)
    for found in world.call("tests.parity.memory:take", nodes.said, "here", spec):
        _is_right(found, "torch-4")
    nodes.lose(1)
    assert world.call("tests.parity.memory:take", nodes.said, "here", spec) == [None] * 4


def test_one_node_sends_nothing(worlds: Worlds, stack: ExitStack) -> None:
    nodes = stack.enter_context(closing(Nodes(1, 2)))
    world = worlds.get("horovod-2")
    for written, sent in world.call("tests.parity.memory:keep", nodes.said, "here", DATA_2, [7]):
        assert written
        assert set(sent) <= {"all_gather"}  # who shares a node
    assert nodes.parts(0) == [0, 1]
    for found in world.call("tests.parity.memory:take", nodes.said, "here", DATA_2):
        _is_right(found, "horovod-2")


def test_without_a_launcher_nothing_is_kept(worlds: Worlds) -> None:
    """On one process too many."""
    said = ["", f"5 {2**22 + 1} 3 4"]
    world = worlds.get("horovod-2")
    for _, sent in world.call("tests.parity.memory:keep", said, "here", DATA_2, [7]):
        assert set(sent) <= {"all_gather"}  # who shares a node
    assert world.call("tests.parity.memory:take", said, "here", DATA_2) == [None] * 2


@pytest.mark.parametrize("lost", [0, 1])
def test_what_layers_keep_is_kept_too(lost: int, worlds: Worlds, tmp_path: Path, stack: ExitStack) -> None:
    """What process 0 has says what all get, also where its node is lost."""
    nodes = stack.enter_context(closing(Nodes(2, 2)))
    world, spec = worlds.get("torch-2"), replace(DATA_2, zero=3)
    world.call("tests.parity.keeping:keep", nodes.said, str(tmp_path), spec)
    nodes.lose(lost)
    assert world.call("tests.parity.keeping:take", nodes.said, str(tmp_path), spec) == [("of 0", 0.5)] * 2

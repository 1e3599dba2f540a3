"""A step in memory, by one process: which step stands after whatever moment it is lost at."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from unidist.backends.environment import EACH, MEMORY, NodeMemory
from unidist.checkpoint.memory import BLOCK, Key, Part, Slot, contents_of, parts_in, pieces_of
from unidist.checkpoint.tensors import Tensor, files_of
from unidist.errors import CheckpointError
from unidist.launch.run import Memory

FILES = files_of([Tensor("a", "float32", (3, 5)), Tensor("b", "uint8", (7,), "state")])


class Lost(BaseException):
    """The process is gone."""


@pytest.fixture
def paths() -> Iterator[tuple[str, ...]]:
    memory = Memory(1)
    found = NodeMemory.read(memory.variables)
    assert found is not None
    yield found.of(0)
    memory.close()


def key(step: int) -> Key:
    return Key(step, 0, "/checkpoints", 2)


def write(slot: Slot, step: int, beside: int = 0) -> None:
    """A step, with so many bytes of a neighbour's beside it."""
    neighbour = blob(step, beside) if beside else b""
    slot.begin()
    slot.write("a", 0, np.full((3, 5), step, np.float32))
    slot.write("b", 2, np.arange(5, dtype=np.uint8))
    slot.finish(key(step), 0, FILES, {"note": step})
    for begin in range(0, len(neighbour), 3 * BLOCK):
        slot.keep(begin, np.frombuffer(neighbour[begin:], np.uint8), len(neighbour) // BLOCK)
    slot.stand()


@functools.cache
def blob(step: int, nbytes: int) -> bytes:
    """A part, as a neighbour sends it."""
    memory = Memory(1)
    found = NodeMemory.read(memory.variables)
    assert found is not None
    slot = Slot(found.of(0))
    slot.begin()
    slot.write("a", 40, np.arange(nbytes, dtype=np.uint8))
    slot.finish(key(step), 1, FILES, {})
    out = np.zeros(slot.blocks * BLOCK, np.uint8)
    slot.own(0, out)
    slot.close()
    memory.close()
    return out.tobytes()


def whole(part: Part) -> dict[str, tuple[int, list[int]]]:
    """Piece's name -> (its first byte, its bytes)."""
    found, at = {}, 0
    for name, begin, nbytes in pieces_of(part.table):
        out = np.empty(nbytes, np.uint8)
        part.read(at, out)
        found[name], at = (begin, out.tolist()), at + nbytes
    return found


def steps(paths: tuple[str, ...]) -> list[int]:
    return sorted(part.key.step for part in parts_in(paths))


def test_own_and_neighbours_part(paths: tuple[str, ...]) -> None:
    slot = Slot(paths)
    write(slot, 4, 20000)
    own, kept = parts_in(paths)
    assert (own.key, own.place, kept.key, kept.place) == (key(4), 0, key(4), 1)
    assert whole(own) == {"a": (0, list(np.full(15, 4, np.float32).tobytes())), "b": (2, [0, 1, 2, 3, 4])}
    assert whole(kept) == {"a": (40, [n % 256 for n in range(20000)])}
    files, facts = contents_of(own.table)
    assert ({name: t for file in files for name, t in file.tensors.items()}, facts) == (
        {name: t for file in FILES for name, t in file.tensors.items()},
        {"note": 4},
    )
    slot.close()


def test_the_one_before_the_last_gives_way(paths: tuple[str, ...]) -> None:
    slot = Slot(paths)
    seen = []
    for step in (1, 2, 3, 4):
        write(slot, step)
        seen.append(steps(paths))
    assert seen == [[1], [1, 2], [2, 3], [3, 4]]
    slot.close()


@pytest.mark.parametrize("is_neighboured", [False, True])
def test_lost_at_any_moment_a_whole_step_stands(is_neighboured: bool, paths: tuple[str, ...]) -> None:
    neighbour = 20000 if is_neighboured else 0
    for step in range(6):
        blob(step, 20000)
    slot = Slot(paths)
    write(slot, 1, neighbour)
    pwrite, count = os.pwrite, 0

    def counted(*args: Any) -> int:
        nonlocal count
        count += 1
        return pwrite(*args)

    with mock.patch("os.pwrite", counted):
        write(slot, 2, neighbour)
    assert count >= 4
    write(slot, 3, neighbour)
    write(slot, 4, neighbour)
    for last in range(count):
        done = 0

        def lost(opened: int, data: Any, offset: int, last: int = last) -> int:
            nonlocal done
            done += 1
            if done > last:
                # Half of it, if it is longer than a word.
                pwrite(opened, bytes(data)[: len(bytes(data)) // 2], offset)
                raise Lost
            return pwrite(opened, data, offset)

        with mock.patch("os.pwrite", lost), pytest.raises(Lost):
            write(slot, 5, neighbour)
        slot.close()
        assert set(steps(paths)) - {3, 5} == {4}
        own = next(part for part in parts_in(paths) if part.key.step == 4)
        assert whole(own)["a"] == (0, list(np.full(15, 4, np.float32).tobytes()))
        # Another process takes the place of the lost one, and goes on from 4.
        slot = Slot(paths, key(4))
        write(slot, 3, neighbour)
        assert steps(paths) == sorted([3, 4] * (1 + is_neighboured))
        slot.close()
        slot = Slot(paths, key(4))
    slot.close()


def test_the_step_that_is_gone_on_from_is_overwritten_last(paths: tuple[str, ...]) -> None:
    """Others have no whole step of the later one."""
    for first, second in ((6, 8), (8, 6)):
        slot = Slot(paths)
        write(slot, first)
        write(slot, second)
        slot.close()
        slot = Slot(paths, key(6))
        write(slot, 7)
        assert steps(paths) == [6, 7]
        slot.close()


def test_memory_goes_with_its_launcher(paths: tuple[str, ...]) -> None:
    slot = Slot(paths)
    write(slot, 1)
    slot.close()
    gone = tuple(path.replace(str(os.getpid()), str(2**22 + 1)) for path in paths)
    assert parts_in(gone) == []
    with pytest.raises(CheckpointError, match="No such file"):
        Slot(gone)


def test_a_damaged_table_is_an_error(paths: tuple[str, ...]) -> None:
    slot = Slot(paths)
    write(slot, 1)
    slot.close()
    (part,) = parts_in(paths)
    opened = os.open(part.path, os.O_RDWR)
    os.pwrite(opened, b"?", BLOCK + 65)
    os.close(opened)
    with pytest.raises(CheckpointError, match="damaged"):
        parts_in(paths)


def test_variables_name_two_files_for_each_process() -> None:
    memory = Memory(3)
    found = NodeMemory.read(memory.variables)
    assert found is not None
    assert len(found.paths) == EACH * 3
    assert found.of(2) == found.paths[4:]
    assert all(Path(path).exists() for path in found.paths)
    memory.close()
    assert not any(Path(path).exists() for path in found.paths)
    assert Memory(0).variables == {}
    assert NodeMemory.read({MEMORY: ""}) is None

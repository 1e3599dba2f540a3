"""Checkpoints written while training goes on: by one process beside each, one checkpoint at a time."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidist.checkpoint.background import Background
from unidist.checkpoint.folders import FolderDirectory
from unidist.flight.recorder import recorder
from unidist.keras.checkpoint.states import State, agree, by_first, tried
from unidist.keras.consistency.processes import Processes


@dataclass(frozen=True)
class _UnderWay:
    holders: Processes
    folder: Path
    keep: int | None
    step: int


class _Writer:
    def __init__(self) -> None:
        self.background: Background | None = None
        self.under_way: _UnderWay | None = None

    def at(self, place: int) -> Background:
        if self.background is None or self.background.place != place:
            self.end()
            self.background = Background(place)
        return self.background

    def end(self) -> None:
        if self.background is not None:
            with self.background:
                self.background.wait()
            self.background = None


_writer = _Writer()


def start(state: State, folder: Path, facts: dict[str, Any], keep: int | None, step: int) -> None:
    """Copies what this process writes, and lets the process beside it write. A collective.

    Raises:
        CheckpointError: on all, where one could not begin.
    """
    agree(state.holders, _begin(state, folder, facts), f"begin to write {folder}")
    _writer.under_way = _UnderWay(state.holders, folder, keep, step)


def _begin(state: State, folder: Path, facts: dict[str, Any]) -> OSError | None:
    background = _writer.at(state.holders.place)
    committed = {"facts": facts, "places": state.holders.count} if state.holders.place == 0 else None
    failure = state.bring(background.write, tried(background.begin))
    return failure or tried(lambda: background.start(folder, state.files, committed))


def wait() -> None:
    """Waits for what is under way. A collective of its processes.

    Raises:
        CheckpointError: on all, where one could not write.
    """
    found, _writer.under_way = _writer.under_way, None
    if found is None or _writer.background is None:
        return
    agree(found.holders, tried(_writer.background.wait), f"write {found.folder}")
    recorder.committed(found.step)
    if (keep := found.keep) is not None:
        by_first(found.holders, lambda: {"removed": FolderDirectory(found.folder.parent).prune(keep, found.step)})


def leave() -> None:
    """Waits for what is under way, and ends the process that writes.

    A collective of the processes of both.

    Raises:
        CheckpointError: on all, where one could not write. The process has ended all the same.
    """
    try:
        wait()
    finally:
        close()


def close() -> None:
    """Ends the process that writes, when it has written. No collective.

    Raises:
        CheckpointError: it could not write.
    """
    found, _writer.under_way = _writer.under_way, None
    _writer.end()
    if found is not None and found.keep is not None and found.holders.place == 0:
        FolderDirectory(found.folder.parent).prune(found.keep, found.step)


class _Failure:
    """Ends the program as a failed one when Python lets go of modules: all exit handlers have run by then."""

    # A default, since the module `os` may be gone when it is called.
    def __del__(self, end: Callable[[int], None] = os._exit) -> None:
        end(1)


_failures: list[_Failure] = []


def _at_exit() -> None:
    """No collective: at the end of a program the others may be gone.

    Python prints what an exit handler raises, and would end with exit code 0 all the same.
    """
    try:
        close()
    except BaseException:
        _failures.append(_Failure())
        raise


atexit.register(_at_exit)

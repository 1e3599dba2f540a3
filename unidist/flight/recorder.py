"""Recorder: keeps what this process is at, in under a microsecond a note (benchmarks/recording.py).

In memory until `open` is given a folder; from then on in a file there, mapped into memory. So whoever may read the
folder sees it while this process runs, is stopped, or has been killed, and nothing needs to be written at the end.
The method is that of PyTorch's and NCCL's flight recorders, which write theirs when something is found to be wrong.

Where in the program an entry was called is costly to find. The thread that gives signs of life looks for it, where a
thread has waited for half a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from typing import IO

from unidist.flight.form import (
    END,
    ENTRIES,
    ENTRY,
    ENTRY_FORM,
    HEADER,
    MAGIC,
    PHASES,
    RING,
    SIZE,
    TELL,
    TEXTS,
    WORD,
    file_of,
)

# The folder of the records of a run.
VARIABLE = "UNIDIST_FLIGHT"
# Seconds between two signs of life.
BEAT = 0.25
# Seconds of a wait after which it is found where the program called it.
LASTS = 0.5
# What a process answers when it is asked what it has imported.
TOLD = ".told"
# Beside a record: the stacks of all threads, when they were asked for.
STACKS = ".stacks"
_INITIAL = Path("/proc/self/environ")
# As a shell reports SIGTERM.
_ENDED = 128 + signal.SIGTERM
_now = time.monotonic
_PHASE = {name: number for number, name in enumerate(PHASES)}
_OTHERS = "(one of too many kinds)"
# What each step or collective passes through is looked up once.
_STEPS, _FIRST, _LAST = WORD["steps"], WORD["first_step_ended"], WORD["last_step_ended"]
_FIRST_BEGAN, _STEP = WORD["first_step_began"], _PHASE["step"]
_NOW_IN, _SINCE, _SPENT = WORD["phase"], WORD["phase_began"], WORD["starting"]
_BEGUN, _ENDED_AT, _THREAD = 3, 4, 6
_write = struct.Struct(ENTRY_FORM).pack_into


class Recorder:
    """The record of one process."""

    def __init__(self) -> None:
        self._map: bytearray | mmap.mmap = bytearray(SIZE)
        self._look()
        self._numbers = itertools.count(1)
        self._kinds: dict[str, int] = {}
        self._counts: list[Iterator[int]] = []
        self._stacks: IO[bytes] | None = None
        self._path: Path | None = None
        self._lock = threading.Lock()
        self._whole[WORD["magic"]] = MAGIC
        self._whole[WORD["pid"]] = os.getpid()
        self._times[WORD["began"]] = self._times[WORD["phase_began"]] = _now()
        self.kind("")

    def _look(self) -> None:
        self._whole = memoryview(self._map).cast("Q")
        self._times = memoryview(self._map).cast("d")

    # where it is kept -------------------------------------------------------------------------------------------------

    def open(self, folder: Path, rank: int, processes: int, line_of: Callable[[int], str] = lambda thread: "") -> None:
        """Keeps the record in a file from here on, with a sign of life four times a second.

        SIGUSR2 then writes the stacks of all threads beside it. A record of the same rank that is there is replaced.

        Args:
            folder: where the file is made.
            rank, processes: which process this is, of how many.
            line_of: the line of the program that a thread is at, as "file.py:12 in name", or "".

        Raises:
            OSError: it cannot be made.
        """
        path = file_of(folder, rank)
        made = path.with_suffix(f".{os.getpid()}")
        made.write_bytes(self._map)
        with made.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._look()
        self.set("rank", rank)
        self.set("processes", processes)
        self.set("pid", os.getpid())
        self._times[WORD["beat"]] = _now()
        made.replace(path)
        self._path = path
        if hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            self._stacks = path.with_suffix(STACKS).open("wb")
            faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True, chain=False)
        threading.Thread(target=self._live, args=(path, line_of), name="unidist-life", daemon=True).start()

    def close(self) -> None:
        """Keeps the record in memory again. The file stays, as that of no process."""
        if self._path is None:
            return
        self.set("pid", 0)
        self._leave()

    def _leave(self) -> None:
        self._path = None
        self._map = bytearray(self._map)
        self._look()
        self.set("pid", os.getpid())
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR2)
            self._stacks.close()
            self._stacks = None

    def forked(self) -> None:
        """In a child of this process, which would write into its record: keeps one of its own, in memory."""
        self._lock = threading.Lock()
        self._leave()
        self._times[WORD["began"]] = self._times[WORD["phase_began"]] = _now()

    def _live(self, path: Path, line_of: Callable[[int], str]) -> None:
        has_told = False
        while self._path == path:
            self._times[WORD["beat"]] = _now()
            # Signs of life go on, whatever a thread's frames look like meanwhile.
            with contextlib.suppress(Exception):
                self._find_lines(line_of)
            if self._whole[WORD["order"]] == END:
                # Others are gone, and the main thread may wait for them where no signal's handler runs.
                os._exit(_ENDED)
            if self._whole[WORD["order"]] == TELL and not has_told:
                has_told = True
                with contextlib.suppress(OSError):
                    _tell(path.with_suffix(TOLD))
            time.sleep(BEAT)

    def _find_lines(self, line_of: Callable[[int], str]) -> None:
        before, whole, times = _now() - LASTS, self._whole, self._times
        for at in range(RING, RING + ENTRIES * ENTRY, ENTRY):
            if not times[at + _ENDED_AT] and 0.0 < times[at + _BEGUN] < before and not whole[at + 2]:
                number = whole[at]
                line = line_of(whole[at + _THREAD])
                # It may have gone on meanwhile.
                if not times[at + _ENDED_AT]:
                    self.locate(number, line)

    # collectives ------------------------------------------------------------------------------------------------------

    def kind(self, text: str) -> int:
        """The number of a text, for entries that name it. There is room for some thousands."""
        found = self._kinds.get(text)
        if found is not None:
            return found
        with self._lock:
            return self._kinds[text] if text in self._kinds else self._learn(text)

    def _learn(self, text: str) -> int:
        said = text.encode()
        begin, number = self._whole[WORD["texts"]], len(self._counts)
        if begin + len(said) + 4 > TEXTS - len(_OTHERS) - 4 and text != _OTHERS:
            return self._kinds[_OTHERS] if _OTHERS in self._kinds else self._learn(_OTHERS)
        at = HEADER + begin
        self._map[at : at + 4] = len(said).to_bytes(4, "little")
        self._map[at + 4 : at + 4 + len(said)] = said
        self._whole[WORD["kinds"]] = number + 1
        self._whole[WORD["texts"]] = begin + 4 + len(said)
        self._counts.append(itertools.count(1))
        self._kinds[text] = number
        return number

    def begin(self, kind: int) -> int:
        """Notes that this thread begins something, and waits in it. Gives its number, for `end`."""
        number = next(self._numbers)
        at = (RING + number % ENTRIES * ENTRY) * 8
        _write(self._map, at, number, kind, 0, _now(), 0.0, next(self._counts[kind]), get_ident())
        return number

    def start(self, kind: int) -> int:
        """As `begin`, of something that no thread waits in before `wait`."""
        number = self.begin(kind)
        self.go_on(number)
        return number

    def go_on(self, number: int) -> None:
        """No thread waits any more in what was begun, and it has not ended."""
        at = RING + number % ENTRIES * ENTRY
        if self._whole[at] == number:
            self._times[at + _BEGUN] = -abs(self._times[at + _BEGUN])

    def wait(self, number: int) -> None:
        """This thread waits from now on in what was started."""
        at = RING + number % ENTRIES * ENTRY
        if self._whole[at] == number:
            self._whole[at + _THREAD] = get_ident()
            self._times[at + _BEGUN] = _now()

    def end(self, number: int, failed: bool = False) -> None:
        """Notes that what was begun has ended, by an error where it has failed."""
        at = RING + number % ENTRIES * ENTRY
        if self._whole[at] == number:
            self._times[at + _ENDED_AT] = -_now() if failed else _now()

    def locate(self, number: int, site: str) -> None:
        """Says where in the program an entry was called, once that is known."""
        at = RING + number % ENTRIES * ENTRY
        if self._whole[at] == number:
            self._whole[at + 2] = self.kind(site)

    # what the process is at -------------------------------------------------------------------------------------------

    def set(self, field: str, value: int) -> None:
        """Sets one of the whole numbers of form.py."""
        self._whole[WORD[field]] = value

    def set_timeout(self, seconds: float) -> None:
        """Returns how long this process waits for others."""
        self._times[WORD["timeout"]] = seconds

    def enter(self, phase: str) -> int:
        """Begins a phase. Gives the one before it, as `back` wants it. For the main thread."""
        return self._enter(_PHASE[phase])

    def _enter(self, phase: int) -> int:
        whole, times = self._whole, self._times
        now, before = _now(), whole[_NOW_IN]
        times[_SPENT + before] += now - times[_SINCE]
        times[_SINCE] = now
        whole[_NOW_IN] = phase
        return before

    def back(self, before: int) -> None:
        self._enter(before)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, the main thread is in this phase; seconds of other threads are not counted."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = self.enter(name)
        try:
            yield
        finally:
            self.back(before)

    def step_begins(self) -> None:
        """A step of a training begins."""
        self._enter(_STEP)
        self._times[_FIRST_BEGAN] = self._times[_FIRST_BEGAN] or self._times[_SINCE]

    def stepped(self) -> None:
        """A step of a training has ended."""
        times, now = self._times, _now()
        self._whole[_STEPS] += 1
        times[_FIRST] = times[_FIRST] or now
        times[_LAST] = now

    def went_on(self, steps: int) -> None:
        """A training goes on that has made so many steps; where a program has several, all of them count."""
        self._whole[WORD["resumed"]] += steps

    def committed(self, number: int) -> None:
        """A checkpoint counts."""
        self.set("committed", number + 1)
        self.set("kept", self._whole[_STEPS])
        self._times[WORD["committed_at"]] = _now()

    def __bytes__(self) -> bytes:
        return bytes(self._map)


def _tell(path: Path) -> None:
    modules = dict(sys.modules)
    given = dict(
        variable.partition("=")[::2] for variable in os.fsdecode(_INITIAL.read_bytes()).split("\0") if variable
    )
    now = dict(os.environ)
    said = {
        "modules": {name: _file(module) for name, module in modules.items() if module is not None},
        "absent": [name for name, module in modules.items() if module is None],
        "environ": {name: now.get(name) for name in sorted(now.keys() | given) if now.get(name) != given.get(name)},
    }
    made = path.with_suffix(".telling")
    made.touch(0o600)
    made.write_text(json.dumps(said))
    made.replace(path)


def _file(module: object) -> str:
    # Asked for an attribute, some modules would begin to load.
    try:
        found = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return ""
    return found if isinstance(found, str) else ""


# This process's. Adapters keep no other reference to what is inside: `open` and `close` change it.
recorder = Recorder()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=recorder.forked)


def open_in_environment(rank: int, processes: int, line_of: Callable[[int], str] = lambda thread: "") -> None:
    """Opens this process's record where the environment names a folder."""
    if folder := os.environ.get(VARIABLE):
        recorder.open(Path(folder), rank, processes, line_of)

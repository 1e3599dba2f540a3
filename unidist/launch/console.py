"""Prints what the processes print: each line with its rank. Keeps the end of it for the last word."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import TextIO

_KEPT = 400
_SHOWN_WITHOUT_TRACEBACK = 20
# Both may have torch's "[rank3]: " before them.
TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


class Console:
    """Passes the lines of many processes on to two streams, each as "[rank] line", whole lines only.

    Attributes:
        closed: nobody reads what we write any more (as in `unidist run ... | head`).
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.closed = threading.Event()
        self._out, self._err = out, err
        self._lock = threading.Lock()
        self._errors: dict[int, deque[tuple[float, str]]] = {}
        self._readers: list[threading.Thread] = []
        self._folder: Path | None = None

    def keep_in(self, folder: Path) -> None:
        """Keeps what ranks print from here on in files as well, one of each stream."""
        self._folder = folder

    def attach(self, rank: int) -> tuple[int, int]:
        """Returns file descriptors for a rank's standard output and error.

        The caller closes them once they are passed on.
        """
        self._errors[rank] = deque(maxlen=_KEPT)
        return self._pipe(rank, self._out, "out"), self._pipe(rank, self._err, "err")

    def finish(self, timeout: float = 5.0) -> None:
        """Waits until everything that the processes wrote has been passed on."""
        deadline = time.monotonic() + timeout
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def say(self, text: str) -> None:
        """Writes a line of our own to the error stream."""
        self._write(self._err, f"{text}\n")

    def traceback(self, rank: int) -> tuple[float, list[str]] | None:
        """Returns (when it began, its lines) of a rank's last traceback, with those it is chained to."""
        lines = list(self._errors[rank])
        starts = [i for i, (_, line) in enumerate(lines) if line.endswith(TRACEBACK)]
        if not starts:
            return None
        start = starts.pop()
        while starts and any(line.endswith(_CHAINED) for _, line in lines[starts[-1] : start]):
            start = starts.pop()
        return lines[start][0], [line for _, line in lines[start:]]

    def last_lines(self, rank: int, count: int = _SHOWN_WITHOUT_TRACEBACK) -> list[str]:
        """The end of a rank's error stream."""
        return [line for _, line in self._errors[rank]][-count:]

    def _pipe(self, rank: int, target: TextIO, name: str) -> int:
        reading, writing = os.pipe()
        file = self._folder / f"rank-{rank}.{name}" if self._folder else Path(os.devnull)
        reader = threading.Thread(target=self._pass_on, args=(reading, rank, target, name, file), daemon=True)
        self._readers.append(reader)
        reader.start()
        return writing

    def _pass_on(self, descriptor: int, rank: int, target: TextIO, name: str, file: Path) -> None:
        errors = self._errors[rank] if name == "err" else None
        reading = os.fdopen(descriptor, encoding="utf-8", errors="replace", newline="\n")
        with reading as stream, file.open("a", encoding="utf-8", buffering=1) as kept:
            for raw in stream:
                line = raw.rstrip("\r\n")
                if errors is not None:
                    errors.append((time.monotonic(), line))
                self._write(target, f"[{rank}] {line}\n")
                kept.write(f"{line}\n")

    def _write(self, target: TextIO, text: str) -> None:
        with self._lock:
            if self.closed.is_set():
                return
            try:
                target.write(text)
                target.flush()
            except BrokenPipeError:
                self.closed.set()

"""Writing a step in a process of its own, while the training goes on.

The training copies what is to be written into memory that both processes have, and goes on. The other process is
started once. It imports no framework, gets its work as JSON over a socket, and ends with its parent: what it was
writing then does not count.

Process 0's waits until all parts stand, and commits the step. Who cannot write its part says so in the step's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from unidist.checkpoint import disk
from unidist.checkpoint.folders import FolderDirectory
from unidist.checkpoint.tensors import FileSpec, file_told, parse_json
from unidist.checkpoint.writing import Gathered, part_of
from unidist.errors import CheckpointError

TIMEOUT = 600.0
# Of a message: a million pieces have some 60 MB.
_MOST_MESSAGE = 1 << 28
# Bytes between two looks for the parent, and seconds between two looks for parts.
_PIECE, _LOOK = 16 << 20, 0.05
_MOST_WORDS = 4096
_MEMORY = "memory for a checkpoint"
_MODULE = "unidist.checkpoint.background"
# Ctrl-C, schedulers and many launchers reach all processes of a group. The parent may still want to write: it ends the
# one that writes.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Background:
    """A process that writes for this one.

    Args:
        place: this process's number, as `PartWriter`'s.

    Example:
        >>> background = Background(place=0)
        >>> background.is_busy
        False
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self._memory: BinaryIO | None = None
        self._gathered: Gathered | None = None
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._waits = False
        self._folder = Path()
        self._end: weakref.finalize[..., Background] | None = None

    def begin(self) -> None:
        """Lets what is written from now on replace what was in the memory that both processes have.

        Raises:
            CheckpointError: the other process reads it now.
        """
        self._must_be_idle()
        self._gathered = Gathered(self._shared(), _MEMORY)

    def write(self, name: str, begin: int, data: Any) -> None:
        """As PartWriter.write, into the memory."""
        assert self._gathered is not None
        self._gathered.write(name, begin, data)

    def _shared(self) -> int:
        if self._memory is None:
            with disk.told(_MEMORY):
                self._memory = os.fdopen(os.memfd_create("unidist-checkpoint", os.MFD_CLOEXEC), "r+b")
        return self._memory.fileno()

    def start(
        self,
        folder: str | Path,
        files: Sequence[FileSpec],
        commit: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to bring what is in the memory to the disk; returns at once.

        Args:
            folder: of `FolderDirectory.prepare`.
            files: of `files_of`.
            commit: for process 0: `facts` and `places` as of `Directory.commit`, and how long to wait for the others
                (`timeout`, in seconds). The step is committed when all parts stand.

        Raises:
            CheckpointError: it is still busy; or what was written before failed, and nobody has waited for it.
        """
        self._must_be_idle()
        self.wait()
        message = {
            "folder": str(Path(folder).absolute()),
            "place": self.place,
            "files": [file.told for file in files],
            "pieces": [] if self._gathered is None else self._gathered.pieces,
            "commit": None if commit is None else {"timeout": TIMEOUT, **commit},
        }
        try:
            text = json.dumps(message, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"what is to be written is no JSON: {error}") from error
        if len(text) > _MOST_MESSAGE:
            raise CheckpointError(f"{len(text)} bytes say what is to be written; {_MOST_MESSAGE} is the most")
        self._folder = Path(folder)
        _, channel = self._child = self._child or self._started()
        try:
            channel.send_bytes(text)
        except OSError:
            raise self._lost() from None
        self._gathered, self._waits = None, True

    def wait(self, timeout: float | None = None) -> Path | None:
        """Waits until all is written.

        Returns:
            The step's folder, where it was committed here.

        Raises:
            CheckpointError: it could not be written; the text says why. Or it takes longer than `timeout` seconds.
        """
        if not self._waits or self._child is None:
            return None
        _, channel = self._child
        if not channel.poll(timeout):
            raise CheckpointError(f"a checkpoint is still being written after {timeout:g} s")
        try:
            text = channel.recv_bytes(_MOST_MESSAGE)
        except (EOFError, OSError):
            raise self._lost() from None
        self._waits = False
        match parse_json(text, "the writing process"):
            case {"folder": str() as folder}:
                return Path(folder) if folder else None
            case {"error": str() as words, "file": str() as file, "tensor": str() as tensor}:
                raise CheckpointError(words, file=file, tensor=tensor)
        raise AssertionError(text[:200])

    @property
    def is_busy(self) -> bool:
        """Is true where something is being written now."""
        return self._waits and self._child is not None and not self._child[1].poll()

    def close(self) -> None:
        """Ends the process, also in the midst of writing: `wait` first. Lets the memory go."""
        if self._end is not None:
            self._end()
        if self._memory is not None:
            self._memory.close()
        self._child, self._waits, self._memory, self._gathered = None, False, None, None

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _must_be_idle(self) -> None:
        if self.is_busy:
            raise CheckpointError("the checkpoint before is still being written: wait for it first")

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        given = [theirs.fileno(), self._shared()]
        command = [sys.executable, "-P", "-m", _MODULE, *map(str, given), str(os.getpid())]
        # It ignores them from its beginning, also while it imports what it needs.
        with theirs, disk.told("a process that writes"), _held_back(_IGNORED):
            process = subprocess.Popen(
                command,
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._end = weakref.finalize(self, _ended, process, ours)
        # At the end of a program whoever began to write waits first. Without its socket the process ends by itself.
        self._end.atexit = False
        return process, ours

    def _lost(self) -> CheckpointError:
        assert self._child is not None
        code = _ended(*self._child)
        self.close()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        words = f"the process that writes checkpoints ended {how}"
        _tell_the_first(self._folder, self.place, words)
        return CheckpointError(words)


@contextlib.contextmanager
def _held_back(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Holds signals back, here until the end, and in a process that this thread starts until it is ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(process: subprocess.Popen[bytes], channel: Connection) -> int:
    """Without its socket the process ends."""
    channel.close()
    try:
        return process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _tell_the_first(folder: Path, place: int, words: str) -> None:
    """Process 0 waits for this one's part. On a full disk a file without words may still be made."""
    if place and not (folder / part_of(place)).exists():
        with contextlib.suppress(OSError):
            (folder / f"failed-{place}").write_text(words[:_MOST_WORDS])


def _until_all_wrote(folder: Path, places: int, timeout: float) -> Iterator[None]:
    """Goes on until each process's part stands.

    Raises:
        CheckpointError: one could not write its part, or did not in time.
    """
    until = time.monotonic() + timeout
    left = set(range(places))
    while True:
        for place in sorted(left):
            if (failed := folder / f"failed-{place}").exists():
                with disk.told(failed), failed.open(errors="replace") as file:
                    words = file.read(_MOST_WORDS) or "it could not say why"
                raise CheckpointError(f"process {place} could not write its part: {words}", file=str(failed))
            if (folder / part_of(place)).exists():
                left.discard(place)
        if not left:
            return
        if time.monotonic() > until:
            missing = ", ".join(map(str, sorted(left)[:10]))
            text = f"processes did not write their parts within {timeout:g} s: {missing}"
            raise CheckpointError(f"{folder}: {text}", file=str(folder))
        yield
        time.sleep(_LOOK)


class _Worker:
    def __init__(self, channel: Connection, memory: int, parent: int) -> None:
        self._channel, self._memory, self._parent = channel, memory, parent

    def serve(self) -> None:
        while True:
            # A fork of the parent may hold the other end longer than the parent lives.
            while not self._channel.poll(1.0):
                if os.getppid() != self._parent:
                    os._exit(1)
            job = json.loads(self._channel.recv_bytes(_MOST_MESSAGE))
            try:
                answer = {"folder": self._write(job) or ""}
            except CheckpointError as error:
                _tell_the_first(Path(job["folder"]), job["place"], str(error))
                answer = {"error": str(error), "file": error.file, "tensor": error.tensor}
            self._channel.send_bytes(json.dumps(answer).encode())

    def _end_with_parent(self) -> None:
        # Nothing is sent to who writes: what there is to read is the end.
        if os.getppid() != self._parent or self._channel.poll():
            os._exit(1)

    def _write(self, job: dict[str, Any]) -> str | None:
        folder, commit = Path(job["folder"]), job["commit"]
        directory = FolderDirectory(folder.parent)
        files = [file_told(file) for file in job["files"]]
        with directory.writer(folder.name, files, job["place"]) as part:
            at, piece = 0, np.empty(_PIECE, np.uint8)
            for name, begin, nbytes in job["pieces"]:
                for first in range(0, nbytes, _PIECE):
                    self._end_with_parent()
                    data = piece[: nbytes - first]
                    disk.read_into(self._memory, data.data, at, _MEMORY, name)
                    part.write(name, begin + first, data)
                    at += len(data)
            part.finish()
        if commit is None:
            return None
        for _ in _until_all_wrote(folder, commit["places"], commit["timeout"]):
            self._end_with_parent()
        self._end_with_parent()
        return directory.commit(folder.name, files, commit["facts"], commit["places"])


def main(arguments: Sequence[str]) -> None:
    """Runs in the other process: the numbers of its socket, of the memory, and of its parent."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    opened, memory, parent = map(int, arguments)
    with Connection(opened) as channel, contextlib.suppress(EOFError, ConnectionError):
        _Worker(channel, memory, parent).serve()


if __name__ == "__main__":
    main(sys.argv[1:])

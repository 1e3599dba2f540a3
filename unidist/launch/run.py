"""run: starts, watches, starts again, reports.

Memory of a node that outlives its processes is nameless files, which the launcher keeps open. It names them to its
processes by its own number and theirs. They go with the launcher, whatever ends it, and no limit of a file system holds
for them. Source of the method: memfd_create(2); processes of the same user open such a file at /proc/PID/fd.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from unidist.backends import on_keras, registry
from unidist.backends.door import TOKEN
from unidist.backends.environment import EACH, MEMORY, RESTARTS, TIMEOUT, without_launcher
from unidist.flight.recorder import VARIABLE
from unidist.launch import together
from unidist.launch.attempt import ASKS_TO_LEAVE, Attempt, Ended, Others
from unidist.launch.console import Console
from unidist.launch.ending import mark
from unidist.launch.goodput import Spent, spent
from unidist.launch.jobs import Job
from unidist.launch.preloading import Preloading
from unidist.launch.program import TEMPORARY
from unidist.launch.request import INTERFACES, LOOPBACK_INTERFACE, Request
from unidist.launch.restarts import Again, GivenUp, Restarts, told


class Memory:
    """The memory that the launcher keeps open.

    Args:
        processes: of this node; 0: no memory is kept.

    Attributes:
        variables: for the processes' environment; none where the system has no such files.
    """

    def __init__(self, processes: int) -> None:
        self._files: list[int] = []
        self.variables: dict[str, str] = {}
        if processes and hasattr(os, "memfd_create"):
            self._files = [os.memfd_create("unidist-steps", os.MFD_CLOEXEC) for _ in range(EACH * processes)]
            words = [secrets.randbits(31), os.getpid(), *self._files]
            self.variables = {MEMORY: " ".join(map(str, words))}

    def close(self) -> None:
        """Gives the memory back."""
        while self._files:
            os.close(self._files.pop())


# Seconds of a run whose goodput is told though nobody asked for restarts or a folder of records.
_LONG = 60.0


def run(
    request: Request,
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
    give_up: Callable[[], str | None] = lambda: None,
) -> int:
    """Runs a program in `request.processes` processes and waits for them.

    Each line that a process prints appears with its rank before it. When one fails, or holds up the others for longer
    than the timeout, all are ended. With restarts they are started again, and a training with `unidist.Checkpoint` goes
    on from its last checkpoint. A run that cannot go on ends with the error that it met first, and shows its traceback
    last.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP end all: they get SIGTERM, and SIGKILL after `request.grace` seconds, or at once
    on a second signal. SIGTERM and SIGUSR1 let trainings with a `unidist.Checkpoint` save first. No process that the
    program started outlives the run.

    Args:
        request: what to run.
        out, err: where lines go; None: sys.stdout and sys.stderr.
        give_up: asked again and again while they run: why all shall be ended now, or None.

    Returns:
        0, or the exit code of the process that failed first, or 128 + the number of the signal that ended it or us;
        LEFT (75) where the training was asked to leave and has saved; GIVEN_UP (124) where one held up the others,
        or `give_up` had a reason.

    Raises:
        BackendNotAvailableError: the backend is unknown or not installed.
        CapabilityError: its processes are started in another way; the text says how.
        LaunchError: an option that does not fit the backend.
    """
    registry.find(request.backend)
    console = Console(out or sys.stdout, err or sys.stderr)
    with (
        _signals() as received,
        _folder(request.log_dir) as folder,
        closing(Run(request, console, folder, received)) as run,
    ):
        if request.nodes > 1:
            return together.go(request, run, console, received, give_up)
        return run.go(give_up)


class Run:
    """The attempts of a run."""

    def __init__(self, request: Request, console: Console, folder: Path, received: Sequence[int]) -> None:
        self._request, self._console, self._folder, self._received = request, console, folder, received
        self._restarts = Restarts(request.max_restarts)
        self._attempts: list[Ended] = []
        # What is known of the training where an attempt fails before it has begun.
        self._committed: int | None = None
        self._made = 0
        self._spent, self._accounted = Spent(), time.monotonic()
        self._environ = _environ(request)
        mark(self._environ, uuid.uuid4().hex)
        # Where nothing is started again nobody would read it.
        self._memory = Memory(request.processes if request.max_restarts else 0)
        if request.log_dir is None:
            self._environ[TEMPORARY] = str(folder)
        self._preloading = Preloading(request, self._job(request).common() | self._environ)

    def close(self) -> None:
        self._preloading.close()
        self._memory.close()

    def go(self, give_up: Callable[[], str | None]) -> int:
        """The exit code."""
        while True:
            ended = self.attempt(self._request, give_up)
            if not ended.has_failed:
                return self.report(ended)
            follows = self._restarts.after(ended.progress)
            if isinstance(follows, GivenUp):
                first = self._attempts[follows.attempt]
                return self.report(first, follows.why, None if ended is first else ended)
            self._say_again(ended, follows)
            if not self.pause(follows.pause):
                return self.report(ended)

    def attempt(
        self,
        request: Request,
        give_up: Callable[[], str | None],
        others: Others | None = None,
        number: int | None = None,
    ) -> Ended:
        """Starts the processes of this node, and returns when none of them runs any more.

        Args:
            number: of the attempt, where it is not that of this launcher's.
        """
        number = len(self._attempts) if number is None else number
        folder = self._folder / f"attempt-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._request.log_dir is not None:
            self._console.keep_in(folder)
        environ = self._environ | self._memory.variables | {VARIABLE: str(folder), RESTARTS: str(number)}
        job = self._job(request)
        job.restarts = number
        job.forks = self._preloading.server()
        attempt = Attempt(job, self._console, folder, self._received, self._preloading, others)
        ended = attempt.run(environ, give_up)
        now = time.monotonic()
        # From the end of the attempt before: the pause between them belongs to the restart.
        self._spent += spent(ended.flights, self._accounted, now, is_restart=number > 0, has_failed=ended.has_failed)
        self._accounted = now
        self._attempts.append(ended)
        self._committed = self._committed if ended.committed is None else ended.committed
        self._made = ended.progress or self._made
        return ended

    def _job(self, request: Request) -> Job:
        made: Job = registry.job(request.backend)(request)
        return made

    def _say_again(self, ended: Ended, follows: Again) -> None:
        begin = "the beginning" if self._committed is None else f"checkpoint {self._committed}"
        self._console.say(f"unidist: {ended.what}")
        restart = told(follows.number, self._request.max_restarts, follows.pause)
        self._console.say(f"unidist: {restart}, from {begin} ({self._made} steps were made)")

    def pause(self, seconds: float) -> bool:
        """Waits; returns whether nobody ended the run meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._received and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        return not self._received

    def report(self, ended: Ended, why: str = "", last: Ended | None = None) -> int:
        """Says what the run was, and of what it ended. Its exit code.

        Args:
            why: it is not started again.
            last: the latest failure, where that is another one. It may be what no restart mends.
        """
        if is_told(self._spent, self._request):
            self._console.say(f"unidist: {self._spent}")
        if last is not None:
            error = f": {last.details[-1]}" if last.details else ""
            self._console.say(f"unidist: the last failure was: {last.what}{error}")
        if why:
            self._console.say(f"unidist: {why}; the first failure was:")
        if ended.what:
            self._console.say(f"unidist: {'; '.join(filter(None, (ended.what, ended.heading)))}")
        for line in ended.details:
            self._console.say(line)
        return ended.code


def is_told(spent: Spent, request: Request) -> bool:
    """Returns whether the goodput is of use: where it was asked for, or a run was long enough for it."""
    is_wanted = request.max_restarts > 0 or request.log_dir is not None or spent.all >= _LONG
    return is_wanted and (spent.count > 0 or spent.lost > 0.0)


@contextmanager
def _folder(log_dir: str | None) -> Iterator[Path]:
    if log_dir is not None:
        yield Path(log_dir).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="unidist-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _environ(request: Request) -> dict[str, str]:
    environ = without_launcher(os.environ)
    environ.pop(MEMORY, None)
    # What is asked for here goes before what an earlier program left in the shell.
    served = registry.entry(request.backend).keras_backends
    if served and environ.get("KERAS_BACKEND") not in served:
        environ["KERAS_BACKEND"] = on_keras.among(served).name
    environ |= {"UNIDIST_BACKEND": request.backend, "PYTHONUNBUFFERED": "1"}
    if request.nodes == 1:
        # On several nodes it is the user's to hand out, the same on all: ours would differ.
        environ[TOKEN] = secrets.token_hex(32)
        # gloo and NCCL would listen at the address that the hostname leads to, or at every interface.
        environ = {**dict.fromkeys(INTERFACES, LOOPBACK_INTERFACE), **environ}
    if request.timeout is not None:
        environ[TIMEOUT] = str(request.timeout)
    return environ


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that ask for an end.

    Only Python's main thread may; elsewhere they stay the caller's.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    wanted = (signal.SIGINT, signal.SIGHUP, *ASKS_TO_LEAVE)
    # One that is ignored stays so: nohup's SIGHUP, a shell's background SIGINT.
    before = {n: signal.signal(n, note) for n in wanted if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

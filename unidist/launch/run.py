"""run: starts, watches, reports, ends."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from unidist.backends import registry
from unidist.backends.door import TOKEN
from unidist.backends.environment import TIMEOUT, without_launcher
from unidist.launch.causes import Judge
from unidist.launch.console import Console
from unidist.launch.ending import end, mark
from unidist.launch.jobs import Failure, Job
from unidist.launch.request import INTERFACES, LOOPBACK_INTERFACE, Request

# What timeout(1) ends with.
GIVEN_UP = 124
_POLL = 0.05


def run(
    request: Request,
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
    give_up: Callable[[], str | None] = lambda: None,
) -> int:
    """Runs a program in `request.processes` processes and waits for them.

    Each line that a process prints appears with its rank before it. When one fails, the others are ended, and the
    traceback of the one that failed first is shown last. SIGINT (Ctrl-C), SIGTERM and SIGHUP end all: they get
    SIGTERM, and SIGKILL after `request.grace` seconds, or at once on a second signal. No process that the program
    started outlives the run.

    Args:
        request: what to run.
        out, err: where lines go; None: sys.stdout and sys.stderr.
        give_up: asked again and again while they run: why all shall be ended now, or None.

    Returns:
        0, or the exit code of the process that failed first, or 128 + the number of the signal that ended it or us, or
        GIVEN_UP where `give_up` had a reason.

    Raises:
        BackendNotAvailableError: the backend is unknown or not installed.
        CapabilityError: its processes are started in another way; the text says how.
        LaunchError: an option that does not fit the backend.
    """
    job = registry.job(request.backend)(request)
    registry.find(request.backend)
    console = Console(out or sys.stdout, err or sys.stderr)
    return _supervise(job, console, give_up)


def _supervise(job: Job, console: Console, give_up: Callable[[], str | None]) -> int:
    run_id = uuid.uuid4().hex
    reason: str | None = None
    failures: list[Failure] | None = None
    judge = Judge(console, job.request.processes)
    with _signals() as received:
        try:
            job.start(_environ(job.request, run_id), console)
            while not received and not console.closed.is_set():
                failures = job.poll()
                if failures == [] or (failures and judge.is_settled(failures)):
                    break
                if failures is None and (reason := give_up()):
                    break
                time.sleep(_POLL)
        finally:
            asked = len(received)
            end(run_id, job.groups(), job.running, job.request.grace, hurry=lambda: len(received) > asked)
            console.finish()
            job.close()
    if received:
        console.say(f"unidist: {signal.Signals(received[0]).name}: all processes were ended")
        return 128 + received[0]
    if reason:
        console.say(f"unidist: {reason}: all processes were ended")
        return GIVEN_UP
    if failures is None:
        return 128 + signal.SIGPIPE
    return _report(judge.first(failures), job.request, console) if failures else 0


def _environ(request: Request, run_id: str) -> dict[str, str]:
    """Ours without another launcher's words, with the backend chosen and output unbuffered."""
    environ = without_launcher(os.environ)
    # What is asked for here goes before what an earlier program left in the shell.
    served = registry.entry(request.backend).keras_backends
    if served and environ.get("KERAS_BACKEND") not in served:
        environ["KERAS_BACKEND"] = served[0]
    environ |= {"UNIDIST_BACKEND": request.backend, "PYTHONUNBUFFERED": "1"}
    if request.nodes == 1:
        # On several nodes it is the user's to hand out, the same on all: ours would differ.
        environ[TOKEN] = secrets.token_hex(32)
        # gloo and NCCL would listen at the address that the hostname leads to, or at every interface.
        environ = {**dict.fromkeys(INTERFACES, LOOPBACK_INTERFACE), **environ}
    if request.timeout is not None:
        environ[TIMEOUT] = str(request.timeout)
    mark(environ, run_id)
    return environ


def _report(first: Failure, request: Request, console: Console) -> int:
    """Says which rank failed first, with its traceback last. The exit code of the run."""
    code = first.exit_code
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    if first.rank is None:
        console.say(f"unidist: the agent that starts the processes ended with {how}; what it said is above")
    else:
        found = console.traceback(first.rank)
        lines = found[1] if found else console.last_lines(first.rank)
        what = "its traceback:" if found else "the last it said on standard error:" if lines else "it said nothing"
        others = "; the others were ended" if request.processes > 1 else ""
        console.say(f"unidist: rank {first.rank} of {request.world_size} failed first, with {how}{others}; {what}")
        for line in lines:
            console.say(f"[{first.rank}] {line}")
    return code if code > 0 else 128 - code


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that ask for an end. Only Python's main thread may; elsewhere they stay the caller's."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # One that is ignored stays so: nohup's SIGHUP, a shell's background SIGINT.
    before = {n: signal.signal(n, note) for n in wanted if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

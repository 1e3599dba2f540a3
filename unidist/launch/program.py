"""Runs a script or module as `python` would, and ends the process when it has failed.

Run by path: imports no unidist.

    python .../program.py SCRIPT [arguments]         python .../program.py -m MODULE [arguments]

A JAX process that raised would otherwise wait, at its exit, for processes that wait for it in a collective.

Where the launcher says so, the standard input is its lifeline: a pipe that it alone holds the other end of, and that
ends with it, whatever ended it. Then this process ends, and on Linux all that the run has started. The program itself
gets an empty standard input.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

# Set by the launcher where the standard input is its lifeline.
LIFELINE = "UNIDIST_LIFELINE"
# The launcher's folder for the time that it runs (flight/recorder.py).
TEMPORARY = "UNIDIST_FLIGHT_TEMPORARY"
# What the program's own exit handlers get before a failed process is ended.
_LAST_SECONDS = 1.0
# The exit code of a program that has failed.
_failed_with: list[int] = []


def main(command: Sequence[str]) -> None:
    """Runs the program; a failure ends the process soon, whatever its exit handlers wait for."""
    if os.environ.pop(LIFELINE, None) is not None:
        watch(_taken_from_standard_input())
    # The first that is registered is the last that is called.
    atexit.register(_end_as_failed)
    try:
        _run(command)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            sys.last_value = stop
            _end_soon(stop.code if isinstance(stop.code, int) else 1)
        raise
    except BaseException as error:
        trace = _of_the_program(error.__traceback__)
        # As Python does where nobody catches an error: handlers of its end tell by it that the program has failed.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _end_soon(1)
        sys.exit(1)


def watch(lifeline: int) -> None:
    """Ends this process when nobody holds the other end of the pipe any more.

    A signal at the parent's death (prctl's PR_SET_PDEATHSIG) is Linux's alone, comes when the thread ends that has
    started us, comes from the nearest process only (a fork server), and comes never where that died before we asked.
    """
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True, name="unidist-lifeline").start()


def _end_with(lifeline: int) -> None:
    try:
        while os.read(lifeline, 1):
            pass
    except OSError:  # The program has closed all descriptors: it has made itself independent.
        return
    with contextlib.suppress(Exception):
        end_others()
    with contextlib.suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def end_others() -> None:
    """Ends what else is of this process's innermost run, in other sessions too, and its folder."""
    if folder := os.environ.get(TEMPORARY):
        shutil.rmtree(folder, ignore_errors=True)
    # By path, and only now: a process needs it once.
    runpy.run_path(os.path.join(os.path.dirname(__file__), "ending.py"))["kill_rest"](os.getpid(), LIFELINE)


def _taken_from_standard_input() -> int:
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        script = os.path.abspath(command[0])
        sys.argv = [script, *command[1:]]
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")


def _end_as_failed() -> None:
    """Ends a process that has failed with its own exit code: what frameworks take down later may abort it."""
    if _failed_with:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(_failed_with[0])


def _end_soon(code: int) -> None:
    _failed_with.append(code & 0xFF)
    sys.stdout.flush()
    timer = threading.Timer(_LAST_SECONDS, os._exit, (code & 0xFF,))
    timer.daemon = True
    timer.start()


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without this file's and runpy's frames at its top."""
    ours = (__file__, "<frozen runpy>", runpy.__file__)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])

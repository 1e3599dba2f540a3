"""Runs a script or module as `python` would, and ends the process when it has failed. Run by path: imports no unidist.

    python .../program.py SCRIPT [arguments]         python .../program.py -m MODULE [arguments]

A JAX process that raised would otherwise wait, at its exit, for processes that wait for it in a collective.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

# What the program's own exit handlers get before a failed process is ended.
_LAST_SECONDS = 1.0


def main(command: Sequence[str]) -> None:
    """Runs the program; a failure ends the process soon, whatever its exit handlers wait for."""
    try:
        _run(command)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            _end_soon(stop.code if isinstance(stop.code, int) else 1)
        raise
    except BaseException as error:
        trace = _of_the_program(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _end_soon(1)
        sys.exit(1)


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


def _end_soon(code: int) -> None:
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

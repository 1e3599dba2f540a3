"""Runs in a process of a ProcessWorld: reads calls from the socket at its input, answers there."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    line = _line()
    known = set(sys.path)
    sys.path += [entry for entry in line.recv() if entry not in known]
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, calls), daemon=True).start()
    while (call := calls.get()) is not None:
        line.send_bytes(_answer(*call))
    _leave()


def _leave() -> None:
    """Ends as Python does, but takes nothing apart: of frameworks that takes a quarter of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _line() -> Connection[Any, Any]:
    """Moves the connection aside that is the standard input: what the functions read is empty."""
    line: Connection[Any, Any] = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return line


def _read(line: Connection[Any, Any], calls: queue.SimpleQueue[Any]) -> None:
    """Hands calls to the main thread.

    The parent's end without a goodbye ends this process, even amid a call.
    """
    call: Any = ()
    while call is not None:
        try:
            call = line.recv()
        except (EOFError, OSError):
            os._exit(1)
        calls.put(call)


def _answer(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        module, _, path = target.partition(":")
        function: Any = reduce(getattr, path.split("."), importlib.import_module(module))
        return pickle.dumps((True, function(*args, **kwargs)))
    except Exception as error:
        return pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc())))


if __name__ == "__main__":
    main()

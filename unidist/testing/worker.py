"""Runs in a process of a ProcessWorld: reads calls from its standard input, answers on its output."""

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
from typing import Any, BinaryIO


def main() -> None:
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    requests, replies = _streams()
    known = set(sys.path)
    sys.path += [entry for entry in pickle.load(requests) if entry not in known]
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(requests, calls), daemon=True)
    reader.start()
    while (call := calls.get()) is not None:
        replies.write(_answer(*call))
        replies.flush()
    _leave()


def _leave() -> None:
    """Ends as Python does, but takes nothing apart: of frameworks that takes a quarter of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _streams() -> tuple[BinaryIO, BinaryIO]:
    """Moves the two pipes aside.

    What the functions print goes to standard error, what they read is empty.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _read(requests: BinaryIO, calls: queue.SimpleQueue[Any]) -> None:
    """Hands calls to the main thread.

    The parent's end without a goodbye ends this process, even amid a call.
    """
    while True:
        try:
            call = pickle.load(requests)
        except EOFError:
            os._exit(1)
        calls.put(call)
        if call is None:
            return


def _answer(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        module, _, path = target.partition(":")
        function: Any = reduce(getattr, path.split("."), importlib.import_module(module))
        return pickle.dumps((True, function(*args, **kwargs)))
    except Exception as error:
        return pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc())))


if __name__ == "__main__":
    main()

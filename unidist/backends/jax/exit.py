"""Ends a process whose world is broken at once, where JAX would wait for the others at its exit.

At its exit JAX waits for all processes. One that failed would so keep the others waiting for it in a collective, and
one that was left by another would wait for that one, then be aborted.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from unidist.backends.ending import has_failed

_FAILED = 1


def at_exit(is_lost: Callable[[], bool], before: Callable[[], None] | None = None) -> Callable[[], None]:
    """Ends the process without waiting where it failed or `is_lost`. Gives what takes that back.

    Called before JAX's own handler, as it is registered after it.

    Args:
        before: called where JAX's own handler is to wait for the others.
    """

    def handler() -> None:
        if is_lost() or has_failed():
            _end()
        if before is not None:
            before()

    atexit.register(handler)
    return lambda: atexit.unregister(handler)


def _end() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # What `unidist run` has left here where the program ended itself.
    last = getattr(sys, "last_value", None)
    own = last.code if isinstance(last, SystemExit) and isinstance(last.code, int) else _FAILED
    os._exit(own & 0xFF)

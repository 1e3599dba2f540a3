"""Runs in a process of a notebook's run: calls the function, leaves its outcome in the run's folder."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from unidist import session
from unidist.backends.environment import detect
from unidist.notebook import values

ARGUMENTS, NAMES, RESULT = "arguments", "names", "result"
# As much of a traceback is kept, from its end.
_MOST = 50_000


def names(folder: str) -> Any:
    """The values of the notebook's names, in their order."""
    return values.read(Path(folder) / NAMES)


def answer(function: Callable[..., Any], folder: str) -> None:
    """Calls the function; rank 0 leaves what it returns, and each process the error that it ends with."""
    place = Path(folder)
    args, kwargs = values.read(place / ARGUMENTS)
    try:
        result = function(*args, **kwargs)
        if session.process_index() == 0:
            values.write(result, place / RESULT, f"what {function.__name__} returns")
    except BaseException as error:
        _leave(error, place)
        raise


def _leave(error: BaseException, place: Path) -> None:
    launch = detect()
    rank = 0 if launch is None else launch.process_index
    told = {
        "rank": rank,
        "time": time.time(),
        "kind": type(error).__name__,
        "message": str(error)[-_MOST:],
        "trace": "".join(traceback.format_exception(error.with_traceback(_of_the_function(error))))[-_MOST:],
    }
    written = place / f"error-{rank}.part"
    with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(told, file)
    written.rename(place / f"error-{rank}.json")


def _of_the_function(error: BaseException) -> TracebackType | None:
    """The traceback without this file's frame at its top."""
    trace = error.__traceback__
    return trace.tb_next if trace is not None and trace.tb_next is not None else trace

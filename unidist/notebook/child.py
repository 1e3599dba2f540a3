"""Runs in a process of a notebook's run: calls the function, leaves its outcome in the run's folder."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unidist import session
from unidist.backends.environment import detect
from unidist.notebook import values

ARGUMENTS, NAMES, RESULT = "arguments.npz", "names.npz", "result.npz"
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
    launch, trace = detect(), error.__traceback__
    rank = 0 if launch is None else launch.process_index
    told = {
        "rank": rank,
        "time": time.time(),
        "kind": type(error).__name__,
        "message": str(error)[-_MOST:],
        # Without this file's frame at its top.
        "trace": "".join(traceback.format_exception(type(error), error, (trace and trace.tb_next) or trace))[-_MOST:],
    }
    written = place / f"error-{rank}.part"
    with values.private(written) as file:
        file.write(json.dumps(told).encode())
    written.rename(place / f"error-{rank}.json")

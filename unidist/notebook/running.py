"""notebook_run: starts a function's processes, shows what they print, and hands back what came of it."""

from __future__ import annotations

import io
import json
import math
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

from unidist import launch
from unidist.backends import registry
from unidist.errors import RankFailedError
from unidist.launch.request import LaunchError, Request
from unidist.notebook import values
from unidist.notebook.child import ARGUMENTS, NAMES, RESULT
from unidist.notebook.program import text_of

_LAST_LINES = 30


def notebook_run(
    function: Callable[..., Any],
    *args: Any,
    processes: int = 2,
    backend: str | None = None,
    devices_per_process: int | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> Any:
    """Runs a function in new processes, as `unidist run` does a program; gives what it returns on rank 0.

    The function goes there by its source: with the imports, functions, classes and plain values of the notebook that it
    uses, which each process gets anew. `unidist.use(backend)` is called for it, before Keras is imported. What it
    prints appears with its rank before it. Nothing is pickled: arguments and the result are numbers, strings, None,
    lists, tuples, dicts and NumPy arrays.

    All processes end with the cell: when the function has returned everywhere, at the first failure, when the cell is
    interrupted, after `timeout`, or with the notebook's own process.

    Args:
        function: a function written with def that uses nothing of a function around it.
        *args, **kwargs: its arguments.
        processes: how many, on this machine.
        backend: "torch", "jax", "tensorflow" or "horovod". None: UNIDIST_BACKEND, else that of Keras's backend.
        devices_per_process: as of `unidist run`.
        timeout: seconds that all of it may take. None: no limit, but those of collectives.

    Raises:
        LaunchError: the function, an argument or an option does not fit; nothing was started.
        CapabilityError, BackendNotAvailableError: the backend has no processes, or is not installed.
        RankFailedError: the function failed in a process, with its traceback, or did not return in time.

    Example:
        In a notebook:

        >>> import unidist
        >>> def total(numbers):
        ...     import numpy as np
        ...     mesh = unidist.Mesh({"data": -1})
        ...     mine = np.full(1, float(numbers[unidist.process_index()]))
        ...     parts = unidist.from_local([mine], mesh, unidist.Layout(partial="data"))
        ...     return unidist.all_reduce(parts).numpy()
        >>> unidist.notebook_run(total, [1, 20])
        array([21.])
        >>> unidist.notebook_run(lambda: 0)
        Traceback (most recent call last):
        unidist.launch.request.LaunchError: notebook_run runs functions that are written with def, found <lambda>: ...
    """
    if timeout is not None and not 0 < timeout < math.inf:
        raise LaunchError(f"timeout={timeout!r}: give seconds above 0, or None")
    chosen = backend or registry.name_for_processes()
    with tempfile.TemporaryDirectory(prefix="unidist-notebook-") as name:
        folder = Path(name)
        text, held = text_of(function, folder, chosen)
        values.write([list(args), kwargs], folder / ARGUMENTS, "an argument")
        values.write(list(held.values()), folder / NAMES, "a value of the notebook")
        program = folder / f"{function.__name__}.py"
        with values.private(program) as file:
            file.write(text.encode())
        request = Request(
            backend=chosen,
            command=(str(program),),
            processes=processes,
            devices_per_process=devices_per_process,
        )
        return _result(function.__name__, request, folder, timeout)


def _result(name: str, request: Request, folder: Path, timeout: float | None) -> Any:
    kept = _Kept(sys.stderr)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    late = f"{name} did not return within {timeout} s"
    code = launch.run(request, err=cast(TextIO, kept), give_up=lambda: late if time.monotonic() > deadline else None)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code == 0 and (folder / RESULT).is_file():
        return values.read(folder / RESULT)
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    if errors:
        first = min(errors, key=lambda error: float(error["time"]))
        raise RankFailedError(
            f"rank {first['rank']} of {request.processes}: {first['kind']}: {first['message']}\n\n{first['trace']}",
            rank=int(first["rank"]),
            kind=str(first["kind"]),
            trace=str(first["trace"]),
        )
    if time.monotonic() > deadline:
        raise RankFailedError(f"{late}: all its processes were ended", kind="timeout")
    said = "\n".join(kept.lines) or "nothing was written to the error stream"
    raise RankFailedError(f"a process ended with exit code {code} before {name} returned:\n{said}", kind="ended")


class _Kept(io.TextIOBase):
    """Passes text on, and keeps its last lines."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)

    def write(self, text: str, /) -> int:
        self.lines.extend(text.splitlines())
        return self._target.write(text)

    def flush(self) -> None:
        self._target.flush()

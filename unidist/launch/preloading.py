"""Preloading: imports what a program has imported, in the background, so that a restart is quick.

The server (forkserver.py) is started when the training has made its first step: before, its imports would slow down
those of the program itself, and what the program imports is not known. It works at a low priority.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unidist.backends.environment import without_launcher
from unidist.flight.form import TELL, file_of
from unidist.flight.reading import Flight, order
from unidist.flight.recorder import TOLD
from unidist.launch.forkserver import ForkServer, Program
from unidist.launch.request import Request

_log = logging.getLogger("unidist.launch")
# Never the user's own modules: those may change between two attempts.
_FRAMEWORKS = ("torch", "jax", "jaxlib", "tensorflow", "keras", "keras_hub", "horovod", "unidist")
# Variables that no import reads: processes may differ in them.
_NOT_OF_IMPORTS = ("UNIDIST_", "HOROVOD_", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_", "DTENSOR_")
# Keras asks torch whether there are accelerators when it is imported. Asked of NVML, CUDA is not initialised, which
# processes that are forked later could not use.
_AT_IMPORT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Preloading:
    """The fork server of a run, once it can be had.

    Args:
        request: the run.
        environ: what all processes of the run have in their environments, whatever the attempt.
    """

    def __init__(self, request: Request, environ: Mapping[str, str]) -> None:
        self._request, self._environ = request, dict(environ)
        self._is_wanted = request.max_restarts > 0 and Path("/proc/self/environ").exists()
        self._asked: Path | None = None
        self._server: ForkServer | None = None
        self._thread: threading.Thread | None = None
        self._is_ready = self._is_closed = False

    def look(self, folder: Path, flights: Mapping[int, Flight]) -> None:
        """Goes on with it, as far as that can be. To be called now and then, with the records of an attempt.

        Args:
            folder: where the records are.
            flights: those of all processes, so far as they have one.
        """
        if not self._is_wanted:
            return
        if self._asked != folder:
            train = [one for one in flights.values() if one.first_step_ended is not None or one.committed is not None]
            if len(train) == self._request.processes:
                self._asked = folder
                for rank in flights:
                    with contextlib.suppress(OSError):
                        order(file_of(folder, rank), TELL)
            return
        files = [file_of(folder, rank, TOLD) for rank in sorted(flights)]
        if all(file.exists() for file in files):
            self._is_wanted = False
            self._thread = threading.Thread(target=self._start, args=(files,), daemon=True, name="unidist-preloading")
            self._thread.start()

    def server(self) -> ForkServer | None:
        """Returns the server, once it has imported; None where there is none.

        At a low priority that may take long on a busy machine: nobody waits for it.
        """
        return self._server if self._is_ready else None

    def close(self) -> None:
        """Ends the server."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        if self._thread is not None:
            self._thread.join()
        # What came too late to be read.
        for file in self._asked.glob(f"*{TOLD}") if self._asked is not None else ():
            file.unlink(missing_ok=True)

    def _start(self, files: list[Path]) -> None:
        try:
            changed = _agreed([json.loads(file.read_text())["environ"] for file in files])
            environ = {**self._environ, **_AT_IMPORT, **changed}
            kept = {name: value for name, value in environ.items() if value is not None}
            program = Program(files[0], self._folder(), _FRAMEWORKS)
            begun = time.monotonic()
            self._server = ForkServer(kept, program=program)
            if self._is_closed:
                self._server.close()
            self._server.wait()
            self._is_ready = True
            _log.info("a restart will fork its processes: their imports took %.1f s", time.monotonic() - begun)
        except (RuntimeError, OSError, ValueError) as error:
            if not self._is_closed:
                _log.info("a restart will start new processes: %s", error)
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    def _folder(self) -> str:
        first = self._request.command[0]
        return os.getcwd() if first == "-m" else os.path.dirname(os.path.abspath(first))


def _agreed(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what the program changes in its environment: imports may read it.

    Raises RuntimeError: its processes differ.
    """
    each = [
        {name: value for name, value in without_launcher(one).items() if not name.startswith(_NOT_OF_IMPORTS)}
        for one in told
    ]
    for one in each[1:]:
        if differ := sorted(name for name in one.keys() | each[0] if one.get(name) != each[0].get(name)):
            raise RuntimeError(f"its processes change {', '.join(differ)} in their environments, each in its own way")
    return each[0]

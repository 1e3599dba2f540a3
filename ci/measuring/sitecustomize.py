"""In each Python process of a run that is measured: what its time went to, written when it ends.

Found by Python itself, through PYTHONPATH (`python3 ci/test.py --measure`). A process that is killed says nothing.
Seconds of the process's own core:

- imports: the outermost ones, in the main thread;
- compiling: JAX's tracing, lowering and compiling.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import json
import os
import sys
import threading
import time
import uuid
from typing import Any

_spent = {"imports": 0.0, "compiling": 0.0}
_listens = False
_depth = 0
_import, _import_module = builtins.__import__, importlib.import_module


def _timed(function: Any) -> Any:
    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        global _depth
        if _depth or name in sys.modules or threading.current_thread() is not threading.main_thread():
            return function(name, *args, **kwargs)
        _depth += 1
        began = time.process_time()
        try:
            return function(name, *args, **kwargs)
        finally:
            _depth -= 1
            _spent["imports"] += time.process_time() - began
            if "jax.monitoring" in sys.modules and not _listens:
                _listen()

    return importing


def _listen() -> None:
    global _listens
    register = getattr(sys.modules["jax.monitoring"], "register_event_duration_secs_listener", None)
    if register is not None:
        _listens = True
        register(_add)


def _add(event: str, seconds: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile/"):
        _spent["compiling"] += seconds


def _write() -> None:
    folder = os.environ.get("MEASURED")
    if folder and os.path.isdir(folder):
        # A process may be killed amid it: what has that name is whole.
        half = os.path.join(folder, uuid.uuid4().hex)
        with open(half, "w") as file:
            json.dump(_spent, file)
        os.rename(half, f"{half}.process")


def _forked() -> None:
    _spent.update(imports=0.0, compiling=0.0)


if os.environ.get("MEASURED"):
    builtins.__import__ = _timed(_import)
    importlib.import_module = _timed(_import_module)
    os.register_at_fork(after_in_child=_forked)
    atexit.register(_write)

"""Counting what a node has: cores that may be used, and GPUs, without a framework."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from unidist.launch.request import LaunchError

# What hides GPUs from a process, by their numbers or names.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# Seconds for which a driver that wakes its GPUs is waited for.
_PATIENCE = 60.0
GPUS = "gpu"


def cores() -> int:
    """The cores on which this process may run: those that a scheduler has bound it to, where it has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_of(text: str, environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes that `-n` asks for: a number, or "gpu", one for each GPU shown.

    Raises:
        LaunchError: it is neither, or there is no GPU.

    Example:
        >>> processes_of("4")
        4
        >>> processes_of("gpu", {"CUDA_VISIBLE_DEVICES": "0,3"})
        2
    """
    if text != GPUS:
        try:
            return int(text)
        except ValueError:
            raise LaunchError(f"-n (--processes) must be a number or {GPUS!r}, got {text!r}") from None
    found = _gpus(environ)
    if not found:
        raise LaunchError(f"-n {GPUS}: this node shows no GPU; give a number of processes")
    return found


def _gpus(environ: Mapping[str, str]) -> int:
    for name in _VISIBLE:
        if name in environ:
            # A number that is none hides those behind it.
            shown = environ[name].split(",") if environ[name].strip() else []
            return next((k for k, one in enumerate(shown) if one.strip() == "-1"), len(shown))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        told = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=_PATIENCE, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"-n {GPUS}: {tool} does not list the GPUs ({error}); give a number of processes") from error
    return sum(line.startswith("GPU ") for line in told.splitlines())

"""Enlarges XLA's pool of threads on CPU, which virtual devices need beyond the cores. Imports no JAX."""

from __future__ import annotations

import os

_VARIABLE = "PJRT_NPROC"
_LEAST = 32
_PER_DEVICE = 8


def widen_pool(count: int) -> None:
    """Gives XLA threads enough for `count` virtual devices.

    No effect once XLA has started, or where PJRT_NPROC is set.

    XLA takes as many threads as there are cores or devices. A device that waits in a collective holds a thread of
    this pool; on few cores the last device may then find none to compute with, and XLA ends the process after 40 s
    ("Expected 4 threads to join the rendezvous, but only 3 of them arrived on time").
    """
    os.environ.setdefault(_VARIABLE, str(max(_LEAST, _PER_DEVICE * count, os.cpu_count() or 1)))

"""What the processes of test_losing run: one is killed or stands still, the others tell what they met and when."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import unidist
from tests.launch.runs import wait_until
from tests.support.runs import fresh
from unidist.errors import ProcessLostError


class Fault(keras.callbacks.Callback):
    """The victim is killed at the third batch, or stands still until another has noticed; all note when that was."""

    def __init__(self, how: str, is_victim: bool, noticed: Path) -> None:
        super().__init__()
        self._how, self._is_victim, self._noticed = how, is_victim, noticed
        self.begun = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Who is behind hears of it before it comes so far.
        self.begun = self.begun or time.monotonic()
        if batch == 3:
            self.happen()

    def happen(self) -> None:
        self.begun = time.monotonic()
        if self._is_victim and self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is_victim:
            wait_until(self._noticed.exists, "another process to notice")


def lost(how: str, victim: int, entrance: str, timeout: float, folder: str) -> tuple[str, float, Any]:
    """The error that this process met, after how many seconds, and the error of coming to the others once more."""
    fresh()
    x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x[:8], y[:8], batch_size=4, verbose=0)
    # Not before: on a busy machine processes come to their first step seconds apart.
    unidist.initialize(timeout=timeout)
    noticed = Path(folder) / "noticed"
    fault = Fault(how, unidist.process_index() == victim, noticed)
    try:
        if entrance == "fit":
            model.fit(x, y, batch_size=4, epochs=100, callbacks=[fault], verbose=0)
        else:
            fault.happen()
            model.save(Path(folder) / "model.keras")
    except ProcessLostError as error:
        met = str(error), time.monotonic() - fault.begun, again()
        noticed.touch()
        return met
    return "nothing was noticed", time.monotonic() - fault.begun, None


def again() -> tuple[str, float]:
    begun = time.monotonic()
    try:
        unidist.barrier("data", unidist.Mesh({"data": -1}))
    except ProcessLostError as error:
        return type(error).__name__, time.monotonic() - begun
    return "nothing was noticed", time.monotonic() - begun

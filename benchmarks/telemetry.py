"""What `unidist.Telemetry` adds to a step: fits with it and without it, in turn.

    python benchmarks/telemetry.py                              # one process
    unidist run -n 2 benchmarks/telemetry.py --width 256

A step's seconds are the median over all steps of all fits of a kind. Say `--every 10` to write a line for ten steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import unidist

unidist.use()

import keras  # noqa: E402 (after the backend is chosen)
import numpy as np  # noqa: E402


class Times(keras.callbacks.Callback):  # type: ignore[misc]
    """The seconds from one step's end to the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.last: float | None = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append(now - self.last)
        self.last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--times", type=int, default=6)
    given = parser.parse_args()
    with unidist.DataParallel().scope():
        body = [keras.layers.Dense(given.width, "relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((given.width,)), *body, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x, y = np.ones((6400, given.width), "float32"), np.ones((6400, 1), "float32")
    model.fit(x[:64], y[:64], batch_size=32, verbose=0)
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for k in range(2 * given.times):
            is_told, times = bool(k % 2), Times()
            told = [unidist.Telemetry(folder, given.every)] if is_told else []
            model.fit(x, y, batch_size=32, verbose=0, callbacks=[*told, times])
            found[is_told] += times.seconds
    if unidist.process_index() == 0:
        without, using = (statistics.median(found[is_told]) * 1e6 for is_told in (False, True))
        print(f"{without:.0f} us a step without it, {using:.0f} us with it: {using / without:.3f} to 1")


main()

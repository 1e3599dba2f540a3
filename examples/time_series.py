"""Time series: the next 12 hours of a load, from the last 48, by a net that reads windows from a `PyDataset`.

Every process makes the same windows in the same order, for the shuffle has a seed; each device takes its rows.

    python examples/time_series.py
    unidist run -n 4 examples/time_series.py

It prints:

    mean error of a forecast: as a day before 0..., by the net 0...
    better than "as a day before": True
"""

import math

import unidist

unidist.use(devices=4)

import keras
import numpy as np

PAST, NEXT = 48, 12


def load(hours: int) -> np.ndarray:
    """Days and weeks, a weather that comes and goes, and chance."""
    rng = np.random.default_rng(0)
    hour, weather = np.arange(hours), np.zeros(hours)
    for k in range(1, hours):
        weather[k] = 0.95 * weather[k - 1] + 0.15 * rng.normal()
    weekend = (hour // 24 % 7 >= 5) * 0.5
    return (np.sin(2 * np.pi * hour / 24) * (1 - weekend) + weather + 0.1 * rng.normal(size=hours)).astype("float32")


class Windows(keras.utils.PyDataset):
    """Batches of (the last hours, the next hours)."""

    def __init__(self, series: np.ndarray, batch: int):
        super().__init__()
        self.series, self.batch = series, batch
        self.starts, self.epoch = np.arange(len(series) - PAST - NEXT + 1), 0

    def __len__(self):
        return math.ceil(len(self.starts) / self.batch)

    def __getitem__(self, index):
        first = self.starts[index * self.batch : (index + 1) * self.batch]
        windows = self.series[first[:, None] + np.arange(PAST + NEXT)]
        return windows[:, :PAST, None], windows[:, PAST:]

    def on_epoch_end(self):
        self.epoch += 1
        self.starts = np.random.default_rng(self.epoch).permutation(self.starts)


series = load(24 * 7 * 12)
cut = len(series) * 3 // 4  # what comes later is the test
keras.utils.set_random_seed(0)
with unidist.DataParallel().scope():
    model = keras.Sequential(
        [
            keras.Input((PAST, 1)),
            keras.layers.Conv1D(16, 6, strides=2, activation="relu"),
            keras.layers.Conv1D(32, 6, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(NEXT),
        ]
    )
    model.compile(keras.optimizers.Adam(0.005), "mae")
model.fit(Windows(series[:cut], batch=64), epochs=3, verbose=0)
by_net = model.evaluate(Windows(series[cut:], batch=64), verbose=0)
windows = np.lib.stride_tricks.sliding_window_view(series[cut:], PAST + NEXT)
as_before = float(np.abs(windows[:, PAST:] - windows[:, PAST - 24 : PAST - 24 + NEXT]).mean())
if unidist.process_index() == 0:
    print(f"mean error of a forecast: as a day before {as_before:.3f}, by the net {by_net:.3f}")
    print('better than "as a day before":', by_net < 0.8 * as_before)

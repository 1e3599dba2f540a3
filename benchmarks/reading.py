"""`fit` on several processes over a `fit` of one process that reads its part alone, by kind of data.

    unidist run -n 2 benchmarks/reading.py
    unidist run -n 2 --backend jax benchmarks/reading.py

To read a row costs time: it sleeps. All processes train together on the whole data, and in turn each by itself, by
Keras alone, on as many rows of its own. 1.00 is the goal; who reads whole batches gets the number of processes. Arrays
cost no time for a row but for their copying: theirs are of 48 KB a row, shuffled. Of a PyDataset each process reads
whole batches, but where it gives a process's own rows (auto_shard_dataset=False).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import unidist

unidist.use()

import keras  # noqa: E402 (after the backend is chosen)
import numpy as np  # noqa: E402
from paired import report, seconds  # noqa: E402

FEATURES, WIDE = 16, 12288
OWN = "PyDataset of own rows"
COST = 0.0


def read(rows: Any) -> tuple[Any, Any]:
    """Made from their numbers."""
    numbers = np.asarray(rows, "float32")
    time.sleep(COST * numbers.size)
    x = np.sin(numbers[..., None] * np.arange(1, FEATURES + 1, dtype="float32"))
    return x, x[..., :1]


class Rows:
    """Map-style."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, k: int) -> tuple[Any, Any]:
        return read(k)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, rows: int, batch: int) -> None:
        super().__init__()
        self.rows, self.batch = rows, batch

    def __len__(self) -> int:
        return self.rows // self.batch

    def __getitem__(self, k: int) -> tuple[Any, Any]:
        return read(np.arange(k * self.batch, (k + 1) * self.batch))


def arrays(rows: int, batch: int) -> dict[str, Any]:
    x = np.ones((rows, WIDE), "float32")
    return {"x": x, "y": x[:, :1].copy(), "batch_size": batch}


def loader(workers: int) -> Callable[[int, int], dict[str, Any]]:
    def make(rows: int, batch: int) -> dict[str, Any]:
        from torch.utils.data import DataLoader

        return {"x": DataLoader(Rows(rows), batch, num_workers=workers), "shuffle": False}  # type: ignore[arg-type]

    return make


def tf_data(rows: int, batch: int) -> dict[str, Any]:
    import tensorflow as tf

    def one(k: Any) -> Any:
        x, y = tf.numpy_function(read, [k], (tf.float32, tf.float32))
        return tf.ensure_shape(x, (FEATURES,)), tf.ensure_shape(y, (1,))

    return {"x": tf.data.Dataset.range(rows).map(one).batch(batch, drop_remainder=True), "shuffle": False}


def batches(rows: int, batch: int) -> dict[str, Any]:
    return {"x": Batches(rows, batch), "shuffle": False}


SOURCES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "arrays": arrays,
    "DataLoader": loader(0),
    "DataLoader, 2 workers": loader(2),
    "PyDataset": batches,
    OWN: batches,
    "tf.data": tf_data,
}


def fitting(features: int, data: dict[str, Any], strategy: Any) -> Callable[[], object]:
    model = keras.Sequential([keras.Input((features,)), keras.layers.Dense(1)])
    if strategy is not None:
        unidist.parallelize(model, strategy)
    model.compile("sgd", "mse")
    return lambda: model.fit(**data, epochs=1, verbose=0)


def main() -> None:
    global COST
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="of a batch, for each process")
    parser.add_argument("--steps", type=int, default=20, help="of a fit")
    parser.add_argument("--cost", type=float, default=500, help="microseconds to read a row")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sources", nargs="*", default=[name for name in SOURCES if name != "tf.data"])
    options = parser.parse_args()
    COST, count = options.cost / 1e6, unidist.process_count()
    for name in options.sources:
        own, batch = options.rows * options.steps, options.rows
        features = WIDE if name == "arrays" else FEATURES
        together, alone = "all processes, fit", "each its part alone, fit"
        # What a process is given: the batches of all, or its rows of them.
        shared = 1 if name == OWN else count
        strategy = unidist.DataParallel(auto_shard_dataset=name != OWN)
        candidates = {
            together: fitting(features, SOURCES[name](own * shared, batch * shared), strategy),
            alone: fitting(features, SOURCES[name](own, batch), None),
        }
        times = seconds(candidates, options.repetitions)
        if unidist.process_index() == 0:
            report(f"{name}, {count} processes", times, options.steps, {(together, alone): 1.05})


if __name__ == "__main__":
    main()

"""Keras on TensorFlow, data parallel on virtual devices of one process: unidist over DTensor against MirroredStrategy.

    python benchmarks/keras_tensorflow.py [--devices 2] [--rounds 15] [--steps 30]

The same MLP 784-1024-1024-10 with the same batches of 256 rows a device and SGD with momentum, both through Keras's own
step of fit, in one process, in turns. MirroredStrategy is TensorFlow's own data parallelism. Prints the median of the
paired ratios; absolute times depend on the machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import unidist

ROWS, WIDTH, CLASSES = 256, 1024, 10
AIM = 1.0


def model(kind: Any = None) -> Any:
    """The perceptron, compiled; `kind`: the class of it, keras.Sequential by default."""
    import keras

    keras.utils.set_random_seed(0)
    made = (kind or keras.Sequential)(
        [
            keras.layers.Input((784,)),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=loss, jit_compile=False)
    return made


def fits(trained: Any, rows: int, steps: int) -> Callable[[], Any]:
    """As many steps as are asked for in one call of fit."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows * steps, 784)).astype("float32")
    y = rng.integers(0, CLASSES, size=(rows * steps,)).astype("int32")
    return lambda: trained.fit(x, y, batch_size=rows, shuffle=False, verbose=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    unidist.use("tensorflow", devices=arguments.devices)
    import tensorflow as tf
    from paired import report, seconds

    rows, steps = ROWS * arguments.devices, arguments.steps
    with unidist.DataParallel().scope():
        ours = model()
    with tf.distribute.MirroredStrategy([f"/cpu:{k}" for k in range(arguments.devices)]).scope():
        mirrored = model()
    candidates = {"unidist": ours, "MirroredStrategy": mirrored, "one device": model()}
    times = seconds({name: fits(one, rows, steps) for name, one in candidates.items()}, arguments.rounds)
    bounds = {("unidist", "MirroredStrategy"): AIM, ("unidist", "one device"): AIM}
    report(f"data parallel on {arguments.devices} devices", times, arguments.steps, bounds)


if __name__ == "__main__":
    main()

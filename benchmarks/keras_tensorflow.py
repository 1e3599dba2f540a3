"""Keras on TensorFlow, data parallel on virtual devices of one process: unidist over DTensor against MirroredStrategy.

    python benchmarks/keras_tensorflow.py [--devices 2] [--rounds 15] [--steps 30]

The same MLP 784-1024-1024-10 with the same batches of 256 rows a device and SGD with momentum, both through Keras's own
step of fit, in one process, in turns. MirroredStrategy is TensorFlow's own data parallelism. Prints the median of the
paired ratios; absolute times depend on the machine.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import unidist

ROWS, WIDTH, CLASSES = 256, 1024, 10
AIM = 1.0


def model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    made = keras.Sequential(
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    unidist.use("tensorflow", devices=arguments.devices)
    import numpy as np
    import tensorflow as tf
    from paired import Step, report, seconds

    rows = ROWS * arguments.devices * arguments.steps
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 784)).astype("float32")
    y = rng.integers(0, CLASSES, size=(rows,)).astype("int32")

    def fit(trained: Any) -> Step:
        """As many steps as are asked for in one call of fit."""
        batch = ROWS * arguments.devices
        return lambda: trained.fit(x, y, batch_size=batch, shuffle=False, verbose=0)

    with unidist.DataParallel().scope():
        ours = model()
    with tf.distribute.MirroredStrategy([f"/cpu:{k}" for k in range(arguments.devices)]).scope():
        mirrored = model()
    candidates = {"unidist": fit(ours), "MirroredStrategy": fit(mirrored), "one device": fit(model())}
    times = seconds(candidates, arguments.rounds)
    bounds = {("unidist", "MirroredStrategy"): AIM, ("unidist", "one device"): AIM}
    report(f"data parallel on {arguments.devices} devices", times, arguments.steps, bounds)


if __name__ == "__main__":
    main()

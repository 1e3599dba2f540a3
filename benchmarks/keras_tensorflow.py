"""Keras on TensorFlow, data parallel on virtual devices of one process: unidist over DTensor against others.

    python benchmarks/keras_tensorflow.py [--devices 2] [--rounds 15] [--steps 30]

The same MLP 784-1024-1024-10 with the same batches of 256 rows a device and SGD with momentum, in turns in one process:
through Keras's own step of fit with unidist, with MirroredStrategy (TensorFlow's own data parallelism) and on one
device; and on DTensor by hand, without Keras. Prints the median of the paired ratios; absolute times depend on the
machine.
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


def by_hand(devices: int, rows: int, steps: int) -> Callable[[], Any]:
    """The same steps on DTensor alone: variables, a tf.function of a step, batches that are packed row by row."""
    import numpy as np
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    mesh = dtensor.create_mesh([("batch", devices)], devices=[f"CPU:{k}" for k in range(devices)])
    whole = {rank: dtensor.Layout.replicated(mesh, rank) for rank in (1, 2)}
    cut = {rank: dtensor.Layout.batch_sharded(mesh, "batch", rank) for rank in (1, 2)}

    def variable(shape: tuple[int, ...], scale: float) -> Any:
        made = dtensor.call_with_layout(tf.random.stateless_normal, whole[len(shape)], shape=shape, seed=[0, 1])
        return dtensor.DVariable(made * scale)

    sides = [(784, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES)]
    weights = [variable(shape, 0.05) for pair in sides for shape in (pair, pair[1:])]
    slots = [variable(tuple(weight.shape), 0.0) for weight in weights]

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.matmul(x, weights[0]) + weights[1])
            hidden = tf.nn.relu(tf.matmul(hidden, weights[2]) + weights[3])
            logits = tf.matmul(hidden, weights[4]) + weights[5]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        for gradient, weight, slot in zip(tape.gradient(loss, weights), weights, slots, strict=True):
            slot.assign(0.9 * slot - 0.01 * gradient)
            weight.assign_add(slot)
        return loss

    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, devices, rows // devices, 784)).astype("float32")
    y = rng.integers(0, CLASSES, size=(steps, devices, rows // devices)).astype("int32")

    def run() -> Any:
        for k in range(steps):
            loss = step(dtensor.pack(list(x[k]), cut[2]), dtensor.pack(list(y[k]), cut[1]))
        return float(loss)

    return run


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
    runs = {name: fits(one, rows, steps) for name, one in candidates.items()}
    runs["DTensor by hand"] = by_hand(arguments.devices, rows, steps)
    times = seconds(runs, arguments.rounds)
    bounds = {("unidist", name): AIM for name in runs if name != "unidist"}
    bounds["DTensor by hand", "one device"] = AIM
    report(f"data parallel on {arguments.devices} devices", times, arguments.steps, bounds)


if __name__ == "__main__":
    main()

"""Keras on TensorFlow over Horovod, two processes with one thread each: unidist against Horovod's own optimizer.

    unidist run --backend horovod -n 2 benchmarks/keras_horovod_tensorflow.py [--rounds 15] [--steps 30]

Both programs run in one world, in turns, on an MLP 784-1024-1024-10 with 256 rows a rank and SGD with momentum: fit
under DataParallel, and the same Keras model with a train_step of its own, which reduces gradients by Horovod's
DistributedGradientTape. (hvd.DistributedOptimizer does not serve Keras 3.) Prints the median of the paired ratios;
absolute times depend on the machine.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import unidist

unidist.use("horovod", framework="tensorflow")

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from paired import Step, report, seconds  # noqa: E402

ROWS, WIDTH, CLASSES = 256, 1024, 10
AIM = 1.0


class ByHand(keras.Sequential):
    """What Horovod's users write: Keras's step, with gradients reduced by the tape."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        reduced = hvd.DistributedGradientTape(tape).gradient(loss, [v.value for v in self.trainable_variables])
        self.optimizer.apply(reduced, self.trainable_variables)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self._loss_tracker.result()}


def model(kind: type[keras.Sequential]) -> keras.Sequential:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    made = kind([keras.Input((784,)), *layers, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=loss, jit_compile=False)
    return made


def fits(trained: keras.Sequential, rows: int, steps: int) -> Step:
    """As many steps as are asked for in one call of fit."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows * steps, 784)).astype("float32")
    y = rng.integers(0, CLASSES, size=(rows * steps,)).astype("int32")
    return lambda: trained.fit(x, y, batch_size=rows, shuffle=False, verbose=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with unidist.DataParallel().scope():
        ours = model(keras.Sequential)
    hand = "DistributedGradientTape by hand"
    steps = arguments.steps
    candidates = {"unidist": fits(ours, ROWS * unidist.process_count(), steps), hand: fits(model(ByHand), ROWS, steps)}
    times = seconds(candidates, arguments.rounds, meet=unidist.barrier)
    if unidist.process_index() == 0:
        report("data parallel", times, steps, {("unidist", hand): AIM})


if __name__ == "__main__":
    main()

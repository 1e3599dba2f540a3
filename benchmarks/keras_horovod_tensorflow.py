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
import tensorflow as tf  # noqa: E402
from keras_tensorflow import ROWS, fits, model  # noqa: E402
from paired import report, seconds  # noqa: E402

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with unidist.DataParallel().scope():
        ours = model()
    hand = "DistributedGradientTape by hand"
    steps = arguments.steps
    candidates = {"unidist": fits(ours, ROWS * unidist.process_count(), steps), hand: fits(model(ByHand), ROWS, steps)}
    times = seconds(candidates, arguments.rounds, meet=unidist.barrier)
    if unidist.process_index() == 0:
        report("data parallel", times, steps, {("unidist", hand): AIM})


if __name__ == "__main__":
    main()

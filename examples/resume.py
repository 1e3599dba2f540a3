"""A training that is killed, and goes on where it stood when it is started again.

    python examples/resume.py --kill-at 13      # ends in the middle of an epoch, by SIGKILL
    python examples/resume.py                   # goes on with batch 11, the last that was saved, and ends

Both together come to the loss of a training that was not killed. To start again by itself:
`unidist run -n 4 --max-restarts 3 examples/resume.py --kill-at 13 --once`. On a cluster, where the job's time ends:
`sbatch examples/slurm.sbatch`, or `kubectl apply -f examples/kubernetes.yaml`.

The second command prints:

    goes on behind batch 10
    loss ...
"""

import argparse
import os
import signal
import time
from pathlib import Path

import unidist

unidist.use()

import keras
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--directory", default="run-of-resume")
parser.add_argument("--kill-at", type=int, help="the batch behind which process 0 kills itself")
parser.add_argument("--once", action="store_true", help="only if nothing was saved yet")
parser.add_argument("--pause", type=float, default=0.0, help="seconds behind each batch, as a larger model takes")
options = parser.parse_args()


class AfterEachBatch(keras.callbacks.Callback):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        time.sleep(options.pause)
        is_killed = options.kill_at == self.seen and not (options.once and saved)
        if is_killed and unidist.process_index() == 0:
            os.kill(os.getpid(), signal.SIGKILL)


saved = sorted(path.name for path in Path(options.directory).glob("step-*"))
if saved and unidist.process_index() == 0:
    print("goes on behind batch", int(saved[-1].removeprefix("step-")))

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
with unidist.DataParallel().scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
callbacks = [unidist.Checkpoint(options.directory, every=5), AfterEachBatch()]
history = model.fit(x, x[:, :1] ** 2, batch_size=8, epochs=4, callbacks=callbacks, verbose=0)
if unidist.process_index() == 0:
    print(f"loss {history.history['loss'][-1]:.6f}")

"""One rank that is interrupted, or whose data raises, ends the whole run: nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.runs import alive, pids, run, wait_until
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

PROGRAM = """
import os, pathlib, signal, sys

import unidist

unidist.use(sys.argv[1])
import keras
import numpy as np

index = unidist.process_index()
pathlib.Path(f"rank{index}.pid").write_text(str(os.getpid()))
x, y = np.ones((4, 4), "float32"), np.ones((4, 2), "float32")


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 200

    def __getitem__(self, k):
        if k == 3 and index == 1 and sys.argv[2] == "raises":
            raise OSError("the disk of process 1 is gone")
        return x, y


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and index == 1 and sys.argv[2] == "is interrupted":
            os.kill(os.getpid(), signal.SIGINT)


with unidist.DataParallel(zero=0 if sys.argv[1] == "tensorflow" else 1).scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
model.fit(Data(), epochs=1000, verbose=0, callbacks=[Interrupt()])
"""


@pytest.mark.parametrize(
    ("backend", "how", "text"),
    [
        ("torch", "is interrupted", "KeyboardInterrupt"),
        # Horovod has torch's engine; without a launcher: tests/keras/torch/test_data.py.
        *unless_all((), [("torch", "raises", "the disk of process 1 is gone")]),
        # An interrupt is an exception as any other.
        ("jax", "is interrupted", "KeyboardInterrupt"),
        ("horovod", "raises", "the disk of process 1 is gone"),
        ("tensorflow", "raises", "the disk of process 1 is gone"),
    ],
)
def test_a_rank_that_stops_ends_the_run(backend: str, how: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run(["-n", "2", "--backend", backend, str(script), backend, how], tmp_path)
    assert done.code != 0
    assert text in done.out + done.err
    assert done.seconds < 90
    assert len(pids(tmp_path)) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids(tmp_path)), "the end of both", 10)

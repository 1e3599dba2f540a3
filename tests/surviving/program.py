"""A training to which something happens: what `cells.py` starts in each process of a run.

The fault, the place and the rank come as JSON in the variable FAULT. It happens in the first attempt; one in "loading"
in the second, which another fault has made necessary. Each process writes down which batches it was given, and process
0 the weights that came out.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
CELL = json.loads(os.environ["FAULT"])
RESTARTS, STARTED = (int(os.environ.get(name, "0")) for name in ("UNIDIST_RESTARTS", "STARTED"))
ATTEMPT = RESTARTS + STARTED
# Of a training of 4 epochs of 8 steps, with a checkpoint every 5.
STEP, LAST, EPOCHS, BATCH = 19, 32, 4, 8


def happens(place: str, rank: int | None = None) -> bool:
    at = 1 if CELL["place"] == "loading" else 0
    is_here = CELL["place"] == place and at == ATTEMPT and rank in (None, CELL["rank"])
    # Once: what is started from outside, after a restart, is a second attempt again.
    return bool(is_here and not (FOLDER / "struck").exists())


def strike() -> None:
    """The fault. One of a link comes from outside."""
    if CELL["fault"].startswith("link"):
        return
    (FOLDER / "struck").write_text(repr(time.time()))
    kind = CELL["fault"]
    if kind in ("SIGKILL", "SIGSTOP", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, kind))
        # A signal to stop takes effect in a moment.
        time.sleep(0.2)
    elif kind in ("launcher SIGTERM", "launcher SIGKILL", "node gone", "node back"):
        name = "SIGTERM" if kind.endswith("SIGTERM") else "SIGKILL"
        os.kill(int((FOLDER / "launcher").read_text()), getattr(signal, name))
    elif kind == "exit 0":
        os._exit(0)
    elif kind == "MemoryError":
        raise MemoryError("on purpose")
    elif kind == "loop":
        while True:
            pass
    elif kind == "disk full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        raise ValueError("on purpose")


def main() -> None:
    import unidist

    backend = os.environ["UNIDIST_BACKEND"]
    own = int(next(os.environ[n] for n in ("RANK", "JAX_PROCESS_ID", "HOROVOD_RANK") if n in os.environ))
    if happens("joining", own):
        strike()
    unidist.use(backend, framework="torch") if backend == "horovod" else unidist.use(backend)
    unidist.initialize()
    import keras
    import numpy as np

    rank = unidist.process_index()

    class Late(keras.layers.Layer):
        """Strikes in a forward pass: where a model is compiled, when it is traced."""

        def call(self, x: Any) -> Any:
            if happens("first step", rank) and Late.is_training:
                strike()
            return x

        is_training = False

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return LAST // EPOCHS

        def __getitem__(self, index: int) -> Any:
            with (FOLDER / f"given-{rank}-{100 * STARTED + RESTARTS}").open("a") as file:
                print(index, file=file)
            Batches.given += 1
            if happens("data", rank) and Batches.given == STEP:
                strike()
            rng = np.random.default_rng(index)
            x = rng.normal(size=(BATCH, 8)).astype("float32")
            return x, x.sum(1, keepdims=True) + 1.0

        given = 0

    class Strikes(keras.callbacks.Callback):
        made = 0

        def on_train_begin(self, logs: Any = None) -> None:
            Late.is_training = True

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if CELL["fault"] == "node back" and ATTEMPT == 1:
                # Another process is started meanwhile.
                time.sleep(1.0)
            if happens("forward", rank) and Strikes.made == STEP - 1:
                threading.Timer(0.002, strike).start()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            Strikes.made += 1
            if happens("between steps", rank) and Strikes.made == STEP:
                strike()
            if happens("last step", rank) and Strikes.made == LAST:
                strike()
            if CELL["place"] == "loading" and ATTEMPT == 0 and Strikes.made == STEP:
                raise ValueError("on purpose, for the second attempt")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if happens("evaluating", rank) and Strikes.made >= STEP:
                strike()

    _strike_in_files(rank)
    keras.utils.set_random_seed(7)
    axes = {"data": -1} if CELL["world"] != "2x2" else {"data": 2, "model": 2}
    strategy = unidist.DataParallel() if len(axes) == 1 else unidist.ModelParallel(unidist.Mesh(axes))
    with strategy.scope():
        dropout = keras.layers.Dropout(0.25 if CELL["dropout"] else 0.0)
        layers = [keras.layers.Dense(16, activation="tanh"), Late(), dropout, keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), "mse", metrics=["mae"])
    how = {"every": 10**6, "memory_every": 5} if CELL["in_memory"] else {"every": 5}
    checkpoint = unidist.Checkpoint(FOLDER / "checkpoints", asynchronous=CELL["asynchronous"], **how)
    held = np.ones((BATCH, 8), "float32"), np.ones((BATCH, 1), "float32")
    given: dict[str, Any] = {"validation_data": held, "validation_batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
    model.fit(Batches(workers=1, use_multiprocessing=False), callbacks=[Strikes(), checkpoint], shuffle=True, **given)
    values = [np.asarray(keras.ops.convert_to_numpy(variable)).ravel() for variable in _all_of(model)]
    if rank == 0:
        np.save(FOLDER / "weights.npy", np.concatenate([value.astype("float64") for value in values]))
    unidist.shutdown()


def _all_of(model: Any) -> list[Any]:
    # Seeds are those of a stream that is compared by what it draws.
    return [*model.trainable_variables, *model.optimizer.variables[1:]]


def _strike_in_files(rank: int) -> None:
    """In the middle of writing, or reading, a checkpoint, or a step in memory."""
    from unidist.checkpoint import memory, reading, writing
    from unidist.keras.checkpoint import fetching

    def replace(kind: Any, name: str, place: str, at: int = 0) -> None:
        original, count = getattr(kind, name), 0

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if at in (0, count) and happens(place, rank):
                strike()
            return original(self, *args, **kwargs)

        setattr(kind, name, method)

    replace(writing.PartWriter, "write", "saving", 40)
    replace(memory.Slot, "write", "copying", 40)
    replace(reading.Reader, "read_into", "loading")
    replace(fetching.Source, "read_into", "loading")


if __name__ == "__main__":
    main()

"""A training that an exception ends inside of an epoch, and that is started again by the same program."""

from __future__ import annotations

import os
import random
import signal
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import unidist
from tests.parity.going_on import BATCH, EPOCHS, Told
from tests.parity.going_on import ROWS as RAGGED
from tests.parity.models import CASES
from tests.parity.train import Spec, distributed
from unidist.checkpoint.remote import directory_of
from unidist.flight.form import WORD
from unidist.flight.recorder import recorder
from unidist.keras.checkpoint import turns
from unidist.keras.consistency import stopping

# On TensorFlow batches of another size would be traced once more.
ROWS = 24 if keras.config.backend() == "tensorflow" else RAGGED
RNG = np.random.default_rng(4)
X = RNG.normal(size=(ROWS, 4)).astype("float32")
# The first column names the row.
Y = np.stack([np.arange(ROWS) / ROWS, RNG.normal(size=ROWS)], 1).astype("float32")


class StopTestError(Exception):
    """The end that nobody wanted."""


class Amiss(keras.metrics.Metric):
    """How many rows of the data were not seen exactly once in the epoch."""

    def __init__(self, name: str = "amiss") -> None:
        super().__init__(name=name)
        self.counts = self.add_variable((ROWS,), "zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        rows = ops.cast(ops.round(y_true[:, 0] * ROWS), "int32")
        self.counts.assign_add(ops.sum(ops.one_hot(rows, ROWS, dtype="float32"), 0))

    def result(self) -> Any:
        return ops.sum(ops.abs(self.counts - 1.0))


class Batches(keras.utils.PyDataset):
    """Shuffles its rows by itself, from a generator of its own, and again out of that order with each epoch. Writes
    down what it was asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rng = np.random.default_rng(3)
        self.order = np.arange(ROWS)
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, k: int) -> Any:
        rows = self.order[k * BATCH : (k + 1) * BATCH]
        self.asked.append(rows.tolist())
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.order)


def _loader(own: bool, workers: int = 0) -> Any:
    import torch

    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    generator = torch.Generator().manual_seed(5) if own else None
    return torch.utils.data.DataLoader(rows, BATCH, shuffle=True, generator=generator, num_workers=workers)


def _tf_data(*, repeats: bool = False, unknown: bool = False) -> Any:
    import tensorflow as tf

    found = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS)
    found = found.repeat() if repeats else found
    return (found.filter(lambda x, y: True) if unknown else found).batch(BATCH)


def _forever() -> Any:
    while True:
        rows = np.random.permutation(ROWS)
        for k in range(0, ROWS, BATCH):
            yield X[rows[k : k + BATCH]], Y[rows[k : k + BATCH]]


SOURCES: dict[str, Any] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays by batches": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": "batch"},
    "short epochs": lambda: {"x": X, "y": Y, "batch_size": BATCH // 2, "steps_per_epoch": 4},
    # The next epoch's iterator is made when one ends, and drawn from later.
    "counted epochs": lambda: {"x": X, "y": Y, "batch_size": BATCH, "steps_per_epoch": 6},
    "PyDataset": lambda: {"x": Batches(), "shuffle": True},
    "DataLoader": lambda: {"x": _loader(own=False), "shuffle": False},
    "DataLoader with a generator": lambda: {"x": _loader(own=True), "shuffle": False},
    "DataLoader with workers": lambda: {"x": _loader(own=True, workers=2), "shuffle": False},
    "tf.data": lambda: {"x": _tf_data(), "shuffle": False},
    "tf.data without end": lambda: {"x": _tf_data(repeats=True), "shuffle": False, "steps_per_epoch": 4},
    "tf.data of unknown length": lambda: {"x": _tf_data(unknown=True), "shuffle": False},
    "generator": lambda: {"x": _forever(), "shuffle": False, "steps_per_epoch": 4},
}


def _drawn() -> float:
    """Of each generator of the process on which shuffles hang."""
    found = random.random() + float(np.random.uniform())
    if keras.config.backend() != "torch":
        return found
    import torch

    return found + float(torch.rand(1))


class Steps(keras.callbacks.Callback):
    """Counts, draws random numbers, and ends the training before a batch or at the end of an epoch; or this process is
    asked there to end it."""

    def __init__(self, told: Told, stop: tuple[int, int] | None, is_asked: bool | None) -> None:
        super().__init__()
        self.told, self.stop, self.is_asked = told, stop, is_asked
        self.count = 0
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self.told.random.append(_drawn())
        if self.stop == (epoch, -1):
            self._end(f"before epoch {epoch}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.stop == (self.epoch, batch):
            self._end(f"before batch {batch} of epoch {self.epoch}")
        self.told.steps.append((self.epoch, batch))

    def on_test_begin(self, logs: Any = None) -> None:
        if self.stop == (self.epoch, -2):
            self._end(f"in the validation of epoch {self.epoch}")

    def _end(self, where: str) -> None:
        if self.is_asked is None:
            raise StopTestError(where)
        if self.is_asked:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.count += 1
        self.told.random.append(_drawn())


def build(dropout: float) -> tuple[Any, Any]:
    hidden = layers.Dense(4, activation="tanh", name="column")
    model = keras.Sequential([layers.Input((4,)), hidden, layers.Dropout(dropout), layers.Dense(2, name="row")])
    optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)
    return model, optimizer


def run(
    spec: Spec | None,
    source: str,
    folder: str | None,
    stop: tuple[int, int] | None = None,
    *,
    every: Any = 2,
    epochs: int = EPOCHS,
    dropout: float = 0.25,
    validate: bool = False,
    seed: int | None = 7,
    steps_per_execution: int = 1,
    checkpoint: dict[str, Any] | None = None,
    asked: int | None = None,
) -> Told:
    """Trains from the beginning, or from what is in the folder, to the end or to the stop; where process `asked` is
    asked to end, that is seen at the next step."""
    keras.utils.clear_session(free_memory=False)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    told = Told()
    is_asked = None if asked is None else asked == (0 if spec is None else unidist.process_index())
    with distributed(spec, CASES["mlp_ragged_adam"]):
        model, optimizer = build(dropout)
        # XLA takes seconds on TensorFlow, and no other numbers come of it.
        jit = keras.config.backend() == "jax"
        model.compile(
            optimizer, "mse", metrics=[Amiss(), "mae"], steps_per_execution=steps_per_execution, jit_compile=jit
        )
        given = SOURCES[source]()
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate)
        plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0)
        callbacks: list[Any] = [scheduler, plateau, steps := Steps(told, stop, is_asked)]
        if folder is not None:
            callbacks.insert(0, unidist.Checkpoint(folder, every, **checkpoint or {}))
        if validate:
            given |= {"validation_data": (X[:6], Y[:6])}
        resumed = recorder._whole[WORD["resumed"]]
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.filterwarnings("ignore", "Your input ran out of data")
            if asked is not None:
                patch.setattr(stopping, "_MOST_BETWEEN", 0.0)
            try:
                history = model.fit(**given, epochs=epochs, callbacks=callbacks, verbose=0)
                told.history, told.epochs = history.history, history.epoch
            except (StopTestError, SystemExit) as error:
                told.raised = f"SystemExit {error.code}" if isinstance(error, SystemExit) else type(error).__name__
        told.counted, told.resumed = steps.count, recorder._whole[WORD["resumed"]] - resumed
        told.asked = getattr(given["x"], "asked", [])
        told.rate = float(np.array(model.optimizer.learning_rate))
        told.weights = {v.path: np.array(v.numpy()) for v in model.weights}
        told.slots = [np.array(v.numpy()) for v in model.optimizer.variables]
    return told


def by_the_clock(spec: Spec, folder: str) -> list[int]:
    """After which of twelve batches a training is saved, each of which takes a second, where saves are due after three.
    The clocks of all processes but the first stand still."""
    seconds = iter(range(1000)) if unidist.process_index() == 0 else iter([0] * 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "_now", lambda: float(next(seconds)))
        run(spec, "arrays", folder, every="3s", epochs=2, checkpoint={"keep": None})
    return directory_of(folder).steps()

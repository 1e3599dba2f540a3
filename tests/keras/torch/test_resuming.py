"""`unidist.Checkpoint` in one process: when it saves, what it goes on with, what it refuses.

That numbers are those of a training that was not interrupted, with every backend and source: tests/parity.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from typing import Any

import keras
import numpy as np
import pytest
import torch

import unidist
from unidist.checkpoint.remote import directory_of
from unidist.errors import CheckpointError
from unidist.keras.checkpoint import api as checkpoints
from unidist.keras.checkpoint import later, position, turns
from unidist.keras.checkpoint.position import Position

RNG = np.random.default_rng(4)
X, Y = RNG.normal(size=(10, 4)).astype("float32"), RNG.normal(size=(10, 4)).astype("float32")


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loss of power leaves is a matter of tests/checkpoint; each sync takes long where disks are busy."""
    monkeypatch.setattr("os.fsync", lambda file: None)


class StopTestError(Exception):
    """The end that nobody wanted."""


class Steps(keras.callbacks.Callback):
    """What callbacks are given, and an end before a batch."""

    def __init__(self, stop: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.steps: list[tuple[int, int]] = []
        self.stop = stop

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.stop == (self.epoch, batch):
            raise StopTestError
        self.steps.append((self.epoch, batch))


def model(width: int = 4, seed: int = 7) -> Any:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    found = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width, name="hidden"), keras.layers.Dense(4)])
    found.compile(keras.optimizers.Adam(0.1), "mse")
    return found


def train(*callbacks: Any, epochs: int = 2, seed: int = 7, trained: Any = None, **given: Any) -> Any:
    data = given or {"x": X, "y": Y, "batch_size": 4}
    return (trained or model(seed=seed)).fit(**data, epochs=epochs, callbacks=list(callbacks), verbose=0)


def same(found: Any, wanted: Any) -> None:
    assert found.epoch == wanted.epoch
    for name, values in wanted.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-6, err_msg=name)
    for own, value in zip(found.model.get_weights(), wanted.model.get_weights(), strict=True):
        np.testing.assert_allclose(own, value, rtol=1e-6, atol=1e-7)


# when -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", ["day", "", "s", "3", "-1s", 0, -1, 0.0, float("nan"), float("inf"), True, None])
def test_what_is_neither_epochs_nor_batches_nor_seconds_is_refused(every: Any, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="every="):
        unidist.Checkpoint(tmp_path, every)


@pytest.mark.parametrize(
    ("every", "saved"),
    # Three batches an epoch. What falls due in an epoch's last is saved after it; the end is saved in any case.
    [("epoch", [3, 6]), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (3, [3, 6]), (100, [6]), ("1000s", [6])],
)
def test_when_a_training_is_saved(every: Any, saved: list[int], tmp_path: Any) -> None:
    train(unidist.Checkpoint(tmp_path, every, keep=None))
    assert directory_of(tmp_path).steps() == saved


def test_a_training_goes_on_from_an_object_store(tmp_path: Any) -> None:
    address = f"memory://{tmp_path.name}/run"
    with pytest.raises(StopTestError):
        train(Steps(stop=(1, 1)), unidist.Checkpoint(address, every=1, keep=2))
    steps = Steps()
    same(train(steps, unidist.Checkpoint(address, every=1, keep=2), seed=8), train())
    assert steps.steps == [(1, 1), (1, 2)]
    assert directory_of(address).steps() == [5, 6]
    with pytest.raises(unidist.CapabilityError, match="asynchronous=True writes into folders"):
        unidist.save(model(), address, asynchronous=True)


def test_so_many_checkpoints_stay(tmp_path: Any) -> None:
    train(unidist.Checkpoint(tmp_path, 1, keep=2))
    assert directory_of(tmp_path).steps() == [5, 6]


def test_the_clock_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look is a broadcast where there are several processes."""
    seconds, looks = [0.0], []
    monkeypatch.setattr(turns, "_now", lambda: seconds[0])
    monkeypatch.setattr(turns, "_of_first", lambda number: looks.append(seconds[0]) or number)
    turn = turns.turn("100s")()
    due = []
    for step in range(1, 301):
        seconds[0] = float(step)
        if turn.has_come(1):
            due.append(step)
            turn.saved()
    assert due == [100, 200, 300]
    assert len(looks) < 45


def test_files_are_written_while_training_goes_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last ones before fit returns."""
    how: list[bool] = []
    save = checkpoints.save

    def saving(*args: Any, **given: Any) -> Any:
        how.append(given["asynchronous"])
        return save(*args, **given)

    monkeypatch.setattr(checkpoints, "save", saving)
    whole = train()
    with pytest.raises(StopTestError):
        train(unidist.Checkpoint(tmp_path, 2, asynchronous=True), Steps((1, 2)))
    assert how == [True, True]
    same(train(unidist.Checkpoint(tmp_path, 2, asynchronous=True), steps := Steps(), seed=99), whole)
    assert how == [True, True, False]
    assert steps.steps == [(1, 1), (1, 2)]
    later.close()


def test_logs_of_steps_are_not_asked_for(tmp_path: Any) -> None:
    """What a save sends of the metrics does not grow with the steps; logs that are read are merged in each."""

    def sent(*callbacks: Any, batch: int) -> int:
        with unidist.DataParallel().scope():
            trained = model()
        with unidist.ledger() as book:
            trained.fit(X, Y, batch_size=batch, callbacks=list(callbacks), verbose=0)
        return int(book.count(purpose="metrics"))

    alone, few, many = (
        sent(batch=2),
        sent(unidist.Checkpoint(tmp_path / "few", 1000), batch=8),
        sent(unidist.Checkpoint(tmp_path / "many", 1000), batch=2),
    )
    assert few == many
    assert many - alone < 5


# going on -------------------------------------------------------------------------------------------------------------


def test_a_training_that_has_ended_does_nothing_more_and_goes_on_with_more_epochs(tmp_path: Any) -> None:
    short, whole = train(), train(epochs=4)
    same(train(unidist.Checkpoint(tmp_path)), short)
    again = train(unidist.Checkpoint(tmp_path), steps := Steps(), seed=99)
    same(again, short)
    assert steps.steps == []
    same(train(unidist.Checkpoint(tmp_path), steps := Steps(), epochs=4, seed=99), whole)
    assert steps.steps[0] == (2, 0)


def test_a_training_that_a_callback_has_ended_stays_ended(tmp_path: Any) -> None:
    def ending() -> Any:
        return keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1)

    ended = train(ending(), unidist.Checkpoint(tmp_path, 100), epochs=9)
    assert ended.epoch == [0, 1]
    same(train(unidist.Checkpoint(tmp_path, 100), ending(), steps := Steps(), epochs=9, seed=99), ended)
    assert steps.steps == []


def test_callbacks_go_on_counting(tmp_path: Any) -> None:
    """EarlyStopping's patience is counted over the interruption, and what was not changed is the program's."""

    def ending(patience: int) -> Any:
        return keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=patience)

    with pytest.raises(StopTestError):
        train(unidist.Checkpoint(tmp_path), ending(9), Steps((2, 1)), epochs=9)
    assert train(unidist.Checkpoint(tmp_path), ending(3), epochs=9).epoch == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras 3.15 says so of each such epoch
def test_data_that_does_not_tell_its_length_is_saved_after_its_last_batch(tmp_path: Any) -> None:
    class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    def data() -> Any:
        return {"x": torch.utils.data.DataLoader(Rows(), batch_size=4), "shuffle": False}

    whole = train(epochs=3, **data())
    with pytest.raises(StopTestError):
        train(unidist.Checkpoint(tmp_path, 3, keep=None), Steps((1, 0)), epochs=3, **data())
    assert directory_of(tmp_path).steps() == [3]
    same(train(unidist.Checkpoint(tmp_path, 3), steps := Steps(), epochs=3, seed=99, **data()), whole)
    assert steps.steps == [(epoch, batch) for epoch in (1, 2) for batch in range(3)]


def test_rows_that_were_trained_on_are_not_read_again(tmp_path: Any) -> None:
    """A map-style DataLoader draws their numbers alone. (Of a PyDataset: tests/parity.)"""
    asked: list[int] = []

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 10

        def __getitem__(self, k: int) -> Any:
            asked.append(k)
            return X[k], Y[k]

    def data() -> Any:
        return {"x": torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True), "shuffle": False}

    # Built, so that nothing is read to build it.
    whole = train(trained=_built(), **data())
    every = asked[:20]
    with pytest.raises(StopTestError):
        train(unidist.Checkpoint(tmp_path, 1), Steps((1, 2)), trained=_built(), **data())
    asked.clear()
    same(train(unidist.Checkpoint(tmp_path, 1), trained=_built(), **data()), whole)
    assert asked == every[-2:]


def _built() -> Any:
    found = model()
    found.optimizer.build(found.trainable_variables)
    found._compile_loss.build(Y[:2], Y[:2])
    return found


def test_without_resuming_a_training_begins_anew_and_its_checkpoints_are_the_latest(tmp_path: Any) -> None:
    first, other = train(), train(seed=99)
    train(unidist.Checkpoint(tmp_path))
    same(train(unidist.Checkpoint(tmp_path, resume=False), seed=99), other)
    assert directory_of(tmp_path).latest() == 12
    same(train(unidist.Checkpoint(tmp_path)), other)
    assert abs(first.history["loss"][0] - other.history["loss"][0]) > 1e-3


def test_a_fit_inside_of_a_fit_is_its_own(tmp_path: Any) -> None:
    inner = model()

    class Inside(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            train(trained=inner, epochs=1)

    train(unidist.Checkpoint(tmp_path, 2, keep=None), Inside(), trained=model(width=3))
    assert directory_of(tmp_path).steps() == [2, 4, 6]


def test_a_list_of_callbacks_of_keras_own(tmp_path: Any) -> None:
    whole = train()
    for stop in ((1, 2), None):
        trained = model()
        own = [unidist.Checkpoint(tmp_path, 4), steps := Steps(stop)]
        callbacks = keras.callbacks.CallbackList(own, add_history=True, model=trained, epochs=2, steps=3)
        with contextlib.suppress(StopTestError):
            trained.fit(X, Y, batch_size=4, epochs=2, callbacks=callbacks, verbose=0)
    assert steps.steps == [(1, 1), (1, 2)]
    same(trained.history, whole)


def test_a_fit_without_the_callback_afterwards_begins_with_its_first_epoch(tmp_path: Any) -> None:
    trained = train(unidist.Checkpoint(tmp_path)).model
    assert train(trained=trained).epoch == [0, 1]


# what is refused ------------------------------------------------------------------------------------------------------


def test_another_model_is_refused(tmp_path: Any) -> None:
    train(unidist.Checkpoint(tmp_path))
    with pytest.raises(CheckpointError, match="hidden/kernel"):
        train(unidist.Checkpoint(tmp_path), trained=model(width=3))


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "manifest.json"])
def test_damage_is_an_error_that_says_which_step_and_without_it_the_training_goes_on(name: str, tmp_path: Any) -> None:
    train(unidist.Checkpoint(tmp_path, every=1, keep=2), epochs=1)
    file = tmp_path / "step-00000003" / name
    found = bytearray(file.read_bytes())
    found[-20] ^= 1
    file.write_bytes(found)
    said = rf"^checkpoint 3 in {tmp_path} is not what was written: {name}: .* from the one before$"
    with pytest.raises(CheckpointError, match=said) as caught:
        train(unidist.Checkpoint(tmp_path))
    assert caught.value.file == name
    shutil.rmtree(file.parent)
    same(train(unidist.Checkpoint(tmp_path)), train())


def test_a_checkpoint_without_a_position_is_refused(tmp_path: Any) -> None:
    unidist.save(train().model, tmp_path, step=3)
    with pytest.raises(CheckpointError, match=r"was not written by unidist\.Checkpoint"):
        train(unidist.Checkpoint(tmp_path))
    with pytest.raises(CheckpointError, match="holds no position"):
        Position.of_json({"course": None, "epoch": 3}, "here")


def test_two_of_them_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="2 callbacks of Checkpoint"):
        train(unidist.Checkpoint(tmp_path / "a"), unidist.Checkpoint(tmp_path / "b"))


def test_a_loop_of_ones_own_is_refused(tmp_path: Any) -> None:
    callbacks = keras.callbacks.CallbackList([unidist.Checkpoint(tmp_path)], model=model())
    with pytest.raises(unidist.CapabilityError, match="in a loop of your own"):
        callbacks.on_train_begin()


# attributes -----------------------------------------------------------------------------------------------------------


class Holder:
    generator: Any

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: np.random.default_rng(3), lambda one: one.random()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda one: one.random()),
        (lambda: np.random.Generator(np.random.SFC64(3)), lambda one: one.random()),
        (lambda: np.random.RandomState(3), lambda one: one.normal()),
        (lambda: random.Random(3), lambda one: one.gauss(0, 1)),
        (lambda: torch.Generator().manual_seed(3), lambda one: float(torch.rand(1, generator=one))),
    ],
)
def test_generators_go_on(make: Any, draw: Any) -> None:
    """The generator stays the object that others hold too."""
    own, other = Holder(generator=make()), Holder(generator=make())
    draw(own.generator)
    found = position.attributes([("a", own)])
    held = other.generator
    position.set_attributes([("a", other)], found)
    assert other.generator is held
    assert [draw(held) for _ in range(3)] == [draw(own.generator) for _ in range(3)]


def test_numbers_and_arrays_go_along_and_nothing_else() -> None:
    values = {"a": 3, "b": 2.5, "c": float("-inf"), "d": None, "e": True, "f": [3, 1, 2], "g": np.arange(4)}
    values |= {"h": np.float32(0.5), "i": np.zeros((2, 2))}
    own, other = Holder(**values, text="x", function=len, objects=[1, "x"]), Holder(**dict.fromkeys(values))
    found = position.attributes([("one", own)])
    assert found["one"].keys() == values.keys()
    position.set_attributes([("one", other)], {"one": {**found["one"], "__class__": 3}})
    for name, value in values.items():
        np.testing.assert_array_equal(getattr(other, name), value)
    assert isinstance(other, Holder)
    assert position.changed(found, position.attributes([("one", Holder(**{**values, "a": 4}))])) == {"one": {"a": 3}}

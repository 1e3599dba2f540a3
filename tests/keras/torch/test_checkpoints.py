"""save and restore on the simulator: training goes on as if nothing had been, and what does not fit is reported."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import unidist
from unidist.checkpoint.background import Background
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.remote import directory_of
from unidist.keras import seeds
from unidist.keras.checkpoint import api as checkpoints
from unidist.keras.checkpoint import later

X = np.random.default_rng(1).normal(size=(32, 6)).astype("float32")
Y = np.random.default_rng(2).normal(size=(32, 4)).astype("float32")
STRATEGIES: dict[str, Callable[[], Any]] = {
    "data": lambda: unidist.DataParallel(unidist.Mesh({"data": 4})),
    "zero 1": lambda: unidist.DataParallel(unidist.Mesh({"data": 4}), zero=1),
    "zero 3": lambda: unidist.DataParallel(unidist.Mesh({"data": 4}), zero=3),
    "grid": lambda: unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2}), zero=3),
}


@pytest.fixture
def writer() -> Iterator[None]:
    """What writes in the background ends with the test."""
    yield
    later.close()


def build(strategy: Any, *, seed: int = 3, width: int = 16, dtype: str | None = None) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        layers = [keras.layers.Dense(width, "relu", name="up", dtype=dtype), keras.layers.Dropout(0.2)]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(4, name="down")], name="net")
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def train(model: Any) -> list[float]:
    found: list[float] = model.fit(X, Y, batch_size=8, epochs=1, verbose=0).history["loss"]
    return found


def values(model: Any) -> list[Any]:
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_goes_on_from_what_was_restored(name: str, tmp_path: Path) -> None:
    model = build(STRATEGIES[name]())
    train(model)
    unidist.save(model, tmp_path)
    losses = train(model)
    wanted = values(model)
    # In the same model, whose layers have gathered other values, and in one that has drawn what a first fit draws.
    other = build(STRATEGIES[name](), seed=4)
    train(other)
    for again in (model, other):
        told = unidist.restore(again, tmp_path)
        assert (told.step, told.skipped, told.converted) == (4, (), ())
        assert train(again) == losses
        for value, found in zip(wanted, values(again), strict=True):
            np.testing.assert_array_equal(value, found)


def test_what_waits_in_an_accumulation_is_saved(tmp_path: Path) -> None:
    """Two steps of three: the slots have what one device's would have."""

    def run(strategy: Any, place: Path) -> dict[str, Any]:
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="down")], name="net")
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3), "mse")
        saving = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: unidist.save(model, place))
        model.fit(X[:16], Y[:16], batch_size=8, epochs=1, verbose=0, shuffle=False, callbacks=[saving])
        with Reader(place) as reader:
            return {name: reader.read(name).view("float32") for name in reader.tensors if "accumulator" in name}

    wanted = run(None, tmp_path / "one")
    found = run(STRATEGIES["zero 1"](), tmp_path / "many")
    assert len(wanted) == 2
    for name, value in wanted.items():
        assert np.abs(value).max() > 1e-3
        np.testing.assert_allclose(found[name], value, atol=1e-5)


def test_what_was_saved_in_the_background_is_of_the_moment_of_saving(tmp_path: Path, writer: None) -> None:
    model = build(STRATEGIES["grid"]())
    train(model)
    wanted = values(model)
    for step in (1, 2, 3):
        place = unidist.save(model, tmp_path, step=step, asynchronous=True, keep=2)
        if step == 3:
            train(model)
    checkpoints.wait()
    assert place == tmp_path / "step-00000003"
    assert directory_of(tmp_path).steps() == [2, 3]
    assert checkpoints.latest(tmp_path) == 3
    unidist.restore(model, tmp_path)
    for value, other in zip(wanted, values(model), strict=True):
        np.testing.assert_array_equal(value, other)


def test_what_is_written_at_the_end_of_a_world_is_waited_for(tmp_path: Path) -> None:
    """The process that writes ends, and old steps go."""
    before = _children()
    model = build(STRATEGIES["grid"]())
    train(model)
    for step in (1, 2, 3):
        unidist.save(model, tmp_path, step=step, asynchronous=True, keep=2)
    assert len(_children() - before) == 1
    unidist.shutdown()
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]
    assert _children() == before
    unidist.shutdown()


@pytest.mark.parametrize("ends", [unidist.shutdown, lambda: unidist.use("sim", devices=2)], ids=["shutdown", "use"])
def test_what_could_not_be_written_is_told_at_the_end_of_a_world(ends: Callable[[], Any], tmp_path: Path) -> None:
    before = _children()
    model = build(STRATEGIES["data"]())
    start = Background.start

    def waits(self: Background, folder: Path, files: Any, commit: dict[str, Any]) -> None:
        start(self, folder, files, {**commit, "places": 2})

    # It waits for a process that is not there.
    with mock.patch.object(Background, "start", waits):
        unidist.save(model, tmp_path, step=1, asynchronous=True)
    (child,) = _children() - before
    os.kill(child, signal.SIGKILL)
    with pytest.raises(unidist.CheckpointError, match="the process that writes checkpoints ended by signal 9"):
        ends()
    assert _children() == before
    ends()
    assert directory_of(tmp_path).steps() == []


def _children() -> set[int]:
    """Processes that this one's threads have started, ended ones too while nobody has asked for them."""
    return {int(one) for task in Path("/proc/self/task").iterdir() for one in (task / "children").read_text().split()}


def test_what_does_not_fit_is_told_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    model = build(STRATEGIES["data"]())
    train(model)
    unidist.save(model, tmp_path)
    wider = build(STRATEGIES["data"](), width=12)
    wider.add(keras.layers.Dense(2, name="more"))
    wider.build((None, 6))
    before = wider.get_weights()
    with pytest.raises(unidist.CheckpointError) as raised:
        unidist.restore(wider, tmp_path)
    assert "- net/up/kernel: has shape (6, 12) in the model and (6, 16) in the checkpoint" in str(raised.value)
    assert "- net/more/kernel: is in the model alone" in str(raised.value)
    for value, other in zip(before, wider.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)
    found = unidist.restore(wider, tmp_path, strict=False)
    assert "net/more/bias: is in the model alone" in found.skipped
    np.testing.assert_array_equal(np.asarray(wider.get_layer("down").bias), np.asarray(model.get_layer("down").bias))


def test_a_model_without_an_optimizer_takes_the_weights_alone(tmp_path: Path) -> None:
    model = build(STRATEGIES["data"]())
    train(model)
    unidist.save(model, tmp_path)
    keras.utils.clear_session()
    layers = [keras.layers.Dense(16, "relu", name="up"), keras.layers.Dropout(0.2)]
    alone = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(4, name="down")], name="net")
    unidist.restore(alone, tmp_path)
    for value, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)


def test_numbers_are_converted_where_the_model_has_others(tmp_path: Path) -> None:
    model = build(STRATEGIES["data"]())
    model.optimizer.build(model.trainable_variables)
    unidist.save(model, tmp_path, step=1)
    short = build(STRATEGIES["data"](), dtype="bfloat16")
    found = unidist.restore(short, tmp_path)
    assert "net/up/kernel: float32 -> bfloat16" in found.converted
    kernel = keras.ops.convert_to_numpy(keras.ops.cast(short.get_layer("up").kernel, "float32"))
    wanted = keras.ops.cast(model.get_layer("up").kernel, "bfloat16")
    np.testing.assert_array_equal(kernel, keras.ops.convert_to_numpy(keras.ops.cast(wanted, "float32")))


def test_whole_numbers_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    def counting(dtype: str) -> Any:
        class Counting(keras.layers.Layer):  # type: ignore[misc]
            def build(self, shape: Any) -> None:
                self.count = self.add_weight(shape=(), dtype=dtype, trainable=False, name="count", initializer="zeros")

            def call(self, x: Any) -> Any:
                return x

        keras.utils.clear_session()
        return keras.Sequential([keras.Input((2,)), Counting(name="counting")], name="net")

    model = counting("int32")
    model.layers[0].count.assign(300)
    unidist.save(model, tmp_path, step=1)
    with pytest.raises(unidist.CheckpointError, match="net/counting/count: has whole numbers that do not fit"):
        unidist.restore(counting("int8"), tmp_path)
    wide = counting("int64")
    assert unidist.restore(wide, tmp_path).converted == ("net/counting/count: int32 -> int64",)
    assert int(wide.layers[0].count) == 300


@pytest.mark.parametrize(
    "text", ["", "[]", '{"seed": 1}', '{"seed": null, "generator": {"array": ["O", [1], ""]}}', "[" * 9999]
)
def test_a_random_state_that_is_none_is_a_typed_error(text: str, tmp_path: Path) -> None:
    model = build(STRATEGIES["data"]())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seeds, "state", lambda: text.encode())
        unidist.save(model, tmp_path, step=1)
    with pytest.raises(unidist.CheckpointError, match="its random state is none"):
        unidist.restore(model, tmp_path)


def test_a_model_that_is_not_built_has_nothing_to_save(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Dense(4)])
    with pytest.raises(unidist.LayoutError, match="is not built"):
        unidist.save(model, tmp_path)
    assert not list(tmp_path.iterdir())


UNWRITTEN = """
import atexit, resource, sys
import unidist
unidist.use("sim", devices=2)
import keras
from unidist.keras.checkpoint import api, later

atexit.register(print, "the program's own handler")
with unidist.DataParallel(unidist.Mesh({"data": 2})).scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile("sgd", "mse")
unidist.save(model, sys.argv[1], step=1, asynchronous=True)
api.wait()
writer = later._writer.background._child[0].pid
resource.prlimit(writer, resource.RLIMIT_FSIZE, (16, resource.prlimit(writer, resource.RLIMIT_FSIZE)[1]))
unidist.save(model, sys.argv[1], step=2, asynchronous=True)
print("its last line")
"""


def test_a_program_whose_last_checkpoint_could_not_be_written_ends_as_a_failed_one(tmp_path: Path) -> None:
    """Its own exit handlers have run, and what it has printed is there."""
    command = [sys.executable, "-W", "ignore", "-c", UNWRITTEN, str(tmp_path)]
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.stdout.splitlines() == ["its last line", "the program's own handler"], done.stderr
    assert done.stderr.splitlines()[-1].startswith("unidist.errors.CheckpointError")
    assert done.returncode == 1
    assert directory_of(tmp_path).steps() == [1]

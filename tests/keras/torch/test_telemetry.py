"""What `unidist.Telemetry` writes of a fit in the simulator: figures that the test counts by itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import unidist
from unidist.flight.form import ENTRIES
from unidist.flight.reading import waited
from unidist.flight.recorder import Recorder, recorder
from unidist.keras.api import telemetry


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def model_of(strategy: Any) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    return model


class Clock:
    """Each look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_rows_times_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows in batches of four: the last one has two."""
    monkeypatch.setattr(telemetry, "_now", Clock())
    model, x, y = model_of(unidist.DataParallel()), np.ones((10, 4)), np.ones((10, 3))
    fit = {"batch_size": 4, "epochs": 2, "verbose": 0}
    sent: list[float] = []

    class Bytes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.book = unidist.ledger()
            self.traffic = self.book.__enter__()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.book.__exit__(None, None, None)
            sent.append(sum(float(event.bytes) for event in self.traffic.events if event.purpose == "gradient"))

    history = model.fit(x, y, callbacks=[unidist.Telemetry(tmp_path / "new"), Bytes()], **fit)
    lines = lines_of(tmp_path / "new")
    steps = [line for line in lines if "seconds" in line]
    assert [(line["step"], line["epoch"]) for line in steps] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    # The clock is looked at when a step begins and ends: the first lasts a second, others from end to end two.
    assert [line["seconds"] for line in steps] == [1.0, 2.0, 2.0, 1.0, 2.0, 2.0]
    assert [line["rows_per_second"] for line in steps] == [4.0, 2.0, 1.0, 4.0, 2.0, 1.0]
    assert {line["tokens_per_second"] for line in steps} == {None}
    # Gradients of 12 + 3 numbers, all_reduced over four, and what metrics and the loss send.
    assert all(line["bytes_per_step"] >= 2 * 3 / 4 * 15 * 4 for line in steps)
    assert sum(line["bytes_per_step"] for line in steps[:3]) >= sent[0] > 0
    assert all(line["memory"]["process"] > 1 << 20 for line in steps)
    epochs = [line["epoch_logs"] for line in lines if "epoch_logs" in line]
    assert [logs["loss"] for logs in epochs] == history.history["loss"]


def test_a_line_for_some_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_now", Clock())
    model = model_of(unidist.DataParallel())
    told = unidist.Telemetry(tmp_path, every=2)
    model.fit(np.ones((20, 4)), np.ones((20, 3)), batch_size=4, callbacks=[told], verbose=0)
    steps = [line for line in lines_of(tmp_path) if "seconds" in line]
    assert [(line["step"], line["seconds"], line["last_seconds"]) for line in steps] == [
        (2, 1.5, 2.0),
        (4, 2.0, 2.0),
        (5, 2.0, 2.0),
    ]
    assert [line["rows_per_second"] for line in steps] == [8 / 3, 2.0, 2.0]
    assert all(line["logs"] == {} for line in steps)


def test_logs_of_steps_where_somebody_reads_them(tmp_path: Path) -> None:
    losses: list[float] = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(logs["loss"])

    model = model_of(unidist.DataParallel())
    told = [unidist.Telemetry(tmp_path), Reads()]
    model.fit(np.ones((8, 4)), np.ones((8, 3)), batch_size=4, callbacks=told, verbose=0)
    assert [line["logs"]["loss"] for line in lines_of(tmp_path)[:2]] == losses


def test_each_steps_own_bytes(tmp_path: Path) -> None:
    """Of an accumulation every second step alone sends gradients."""
    model = model_of(unidist.DataParallel())
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    told = [unidist.Telemetry(tmp_path)]
    model.fit(np.ones((16, 4)), np.ones((16, 3)), batch_size=4, callbacks=told, verbose=0)
    found = [line["bytes_per_step"] for line in lines_of(tmp_path)[:4]]
    assert found[0] == found[2] < found[1] == found[3]


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_now", Clock())
    with unidist.DataParallel().scope():
        embed = keras.layers.Embedding(8, 2)
        model = keras.Sequential([keras.Input((5,), dtype="int32"), embed, keras.layers.Flatten()])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 5), "int32"), np.ones((8, 10)), batch_size=8, callbacks=[unidist.Telemetry(tmp_path)])
    assert lines_of(tmp_path)[0]["tokens_per_second"] == 40.0


def test_steps_count_on_where_a_training_goes_on(tmp_path: Path) -> None:
    """With a Checkpoint: what is drawn again and dropped is no step, and no rows."""

    class StopTestError(Exception):
        pass

    class Stops(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise StopTestError

    x, y, model = np.ones((12, 4)), np.ones((12, 3)), model_of(unidist.DataParallel())
    following = [unidist.Telemetry(tmp_path / "told"), unidist.Checkpoint(tmp_path / "saved", every=2)]
    with pytest.raises(StopTestError):
        model.fit(x, y, batch_size=4, callbacks=[*following, Stops()], verbose=0)
    model.fit(x, y, batch_size=4, epochs=2, callbacks=following, verbose=0)
    steps = [line for line in lines_of(tmp_path / "told") if "seconds" in line]
    assert [(line["step"], line["epoch"]) for line in steps] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    assert [round(line["rows_per_second"] * line["seconds"], 6) for line in steps] == [4.0] * 6


def test_what_tensorboard_reads(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    model = model_of(unidist.DataParallel())
    told = unidist.Telemetry(tmp_path)
    model.fit(np.ones((8, 4)), np.ones((8, 3)), batch_size=4, callbacks=[told], verbose=0)
    (file,) = tmp_path.glob("events.out.tfevents.*")
    found = [Event.FromString(data) for data in RawEventFileLoader(str(file)).Load()]
    assert found[0].file_version == "brain.Event:2"
    first, second, epoch = ({value.tag: value.simple_value for value in event.summary.value} for event in found[1:])
    assert [event.step for event in found[1:]] == [1, 2, 2]
    line = lines_of(tmp_path)[1]
    assert second["training/seconds"] == pytest.approx(line["seconds"], rel=1e-6)
    assert second["memory/process"] == pytest.approx(line["memory"]["process"], rel=1e-6)
    assert first.keys() == second.keys()
    assert epoch == {"epoch/loss": pytest.approx(lines_of(tmp_path)[2]["epoch_logs"]["loss"], rel=1e-6)}


def test_what_a_step_waits_for(tmp_path: Path) -> None:
    class Waits(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            for _ in range(batch):
                number = recorder.begin(recorder.kind("all_reduce"))
                time.sleep(0.01)
                recorder.end(number)

    model = model_of(unidist.DataParallel())
    told = [unidist.Telemetry(tmp_path, every=2), Waits()]
    model.fit(np.ones((16, 4)), np.ones((16, 3)), batch_size=4, callbacks=told, verbose=0)
    first, second, _ = lines_of(tmp_path)
    assert 0.005 <= first["exposed_seconds"] < 0.02
    assert 0.025 <= second["exposed_seconds"] <= second["seconds"] + 0.02


def test_waits_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What overlaps is one wait; what goes on, or was read before, is none yet; more than there is room for counts."""
    now = [0.0]
    monkeypatch.setattr("unidist.flight.recorder._now", lambda: now[0])
    record = Recorder()
    kind = record.kind("all_reduce")

    def at(seconds: float) -> float:
        now[0] = seconds
        return seconds

    assert waited(bytes(record), 0) == (0.0, 0)
    at(1.0)
    first = record.begin(kind)
    at(2.0)
    second = record.begin(kind)
    at(4.0)
    record.end(first)
    at(5.0)
    record.end(second, failed=True)
    at(6.0)
    record.begin(kind)
    assert waited(bytes(record), 0) == (4.0, 3)
    assert waited(bytes(record), 2) == (0.0, 3)
    for k in range(2 * ENTRIES):
        at(10.0 + k)
        number = record.begin(kind)
        at(10.5 + k)
        record.end(number)
    seconds, last = waited(bytes(record), 3)
    assert (seconds, last) == (ENTRIES, 3 + 2 * ENTRIES)


def test_every_is_a_number_of_steps() -> None:
    wrong: Any
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="give a number of steps"):
            unidist.Telemetry("nowhere", every=wrong)

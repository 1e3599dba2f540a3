"""Programs whose code sees the whole batch, or that train in turn: each alone, and under any strategy."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import unidist
from tests.keras import inner, quantized, trainers
from tests.keras.torch import sources
from tests.support.runs import Result, fresh, scope, strategy, told

WIDTH, CLASSES, BATCH = 12, 6, 8


def _data(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(4)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, CLASSES, rows).astype("int32")


def _stack(*middle: Any) -> Any:
    ends = [layers.Dense(WIDTH, "tanh", name="a"), *middle, layers.Dense(CLASSES, name="z")]
    return keras.Sequential([keras.Input((6,)), *ends], name="stack")


def _fit(model: Any, rows: int, **options: Any) -> Any:
    x, y = _data(rows)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, **options)
    return model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history


class Doubting(keras.metrics.Metric):
    """A metric of what two others say."""

    def __init__(self) -> None:
        super().__init__(name="doubting")
        self.right, self.sure = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.right.update_state(y, p, sample_weight)
        self.sure.update_state(ops.max(ops.softmax(p), axis=-1), sample_weight)

    def result(self) -> Any:
        return self.sure.result() - self.right.result()

    def reset_state(self) -> None:
        self.right.reset_state()
        self.sure.reset_state()


class Quarters(layers.Layer):
    """A batch has to divide by four: each row beside the one that is a quarter on."""

    def call(self, x: Any) -> Any:
        groups = ops.reshape(x, (4, -1, x.shape[-1]))
        return ops.reshape(groups - 0.5 * ops.roll(groups, 1, axis=0), (-1, x.shape[-1]))

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def _metric_in_a_metric(made: Any) -> Result:
    with scope(made):
        model = _stack()
    return {"history": _fit(model, 22, metrics=[Doubting()]), **told(model)}


def _quarters(made: Any) -> Result:
    with scope(made):
        model = _stack(Quarters())
    return {"history": _fit(model, 24), **told(model)}


def _frozen_and_freed(made: Any) -> Result:
    with scope(made):
        model, histories = _stack(layers.Dense(WIDTH, "tanh", name="b")), []
        for frozen in (("a",), ("a", "z"), ()):
            for layer in model.layers:
                layer.trainable = layer.name not in frozen
            histories.append(_fit(model, 22))
    return {"history": histories, **told(model)}


def _low_rank(made: Any) -> Result:
    with scope(made):
        model = _stack(layers.Dense(WIDTH, name="b"), layers.Dense(WIDTH, "tanh", name="c"))
        for layer in model.layers:
            layer.enable_lora(4)
    return {"history": _fit(model, 22), **told(model)}


def _graphs(made: Any) -> Result:
    with warnings.catch_warnings():  # each rank has whole batches, and says so
        warnings.filterwarnings("ignore", "tensors of a batch")
        numbers, outputs, *weights = sources.trained_on_graphs(made)
    return {"history": numbers, "outputs": outputs, "weights": weights}


def _own(run: Callable[[Any], Result]) -> Callable[[str | None, int], Result]:
    def trained(kind: str | None, zero: int) -> Result:
        fresh()
        with contextlib.nullcontext() if kind is None else unidist.ledger() as book:
            found = run(strategy(kind, zero=zero))
        return {**found, "_sent": len(book.events) if book is not None else 0}

    return trained


def _inner(name: str) -> Callable[[str | None, int], Result]:
    return lambda kind, zero: inner.trained(kind, zero, name, False)


PROGRAMS: dict[str, Callable[[str | None, int], Result]] = {
    "two losses in a function": _inner("both"),
    "losses in a loss's call": _inner("three deep"),
    "a loss's own __call__": _inner("deep"),
    "endpoint": _inner("endpoint"),
    "a loss in the output": _inner("scale"),
    "a metric in a metric": _own(_metric_in_a_metric),
    "distiller": lambda kind, zero: trainers.in_turn(kind, "distilled", zero),
    "quarters": _own(_quarters),
    "frozen and freed": _own(_frozen_and_freed),
    "float8": lambda kind, zero: quantized.trained(kind, zero, "stack"),
    "graphs": _own(_graphs),
    "low rank": _own(_low_rank),
}


def trained(devices: int, name: str, kind: str | None, zero: int = 0) -> Result:
    """Trains a program; `devices`: virtual ones where this process is the simulator, whose default is put back."""
    simulated = kind is not None and unidist.process_count() == 1
    if simulated:
        unidist.use("sim", devices=devices)
    try:
        return PROGRAMS[name](kind, zero)
    finally:
        if simulated:
            unidist.use("sim", devices=4)

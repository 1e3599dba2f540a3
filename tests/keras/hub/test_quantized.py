"""Kernels in int8 and float8, also beside low-rank ones (QLoRA), under found layouts: they are cut, none is gathered,
and training has one device's numbers."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from fractions import Fraction
from typing import Any

import keras
import numpy as np
import pytest

import unidist
from tests.keras.hub import zoo
from tests.support.sampling import unless_all
from unidist.testing.processes import ProcessWorld

RANK, STEPS = 4, 2
SIZES = {**zoo._PLAIN, "num_query_heads": 4, "num_key_value_heads": 4, "hidden_dim": 32, "intermediate_dim": 64}
KERNELS, ROWS_CUT = 14, 4
GRIDS = {"2": {"model": 2}, "4": {"model": 4}, "2x2": {"data": 2, "model": 2}}
# When a model is quantized, beside finding layouts.
ORDERS = ("before", "after", "in the scope")

Sent = Counter[tuple[str, str, Fraction]]


def change(model: Any, kind: str) -> None:
    """Quantizes all kernels of products but the head's; `kind`: a mode of Keras's, or with low-rank kernels."""
    mode, _, added = kind.partition(" ")
    with warnings.catch_warnings():  # Keras names each layer that has no kernel
        warnings.simplefilter("ignore")
        for layer in model._flatten_layers():
            if mode and isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)) and layer.name != "head":
                layer.quantize(mode)
    keras.utils.set_random_seed(3)
    if added and isinstance(model, zoo.M.LlamaBackbone):
        model.enable_lora(RANK)
    elif added:
        for layer in model._flatten_layers():
            if layer.name in ("query", "value"):
                layer.enable_lora(RANK)


def trained(kind: str, strategy: Any, order: str, **compiled: Any) -> tuple[zoo.Trained, Sent]:
    """Trains, and returns what a step sends of layers; strategy: None for one device."""
    keras.utils.set_random_seed(7)

    def build() -> Any:
        backbone = zoo.M.LlamaBackbone(**SIZES)
        if order != "after":
            change(backbone, kind)
        return zoo.with_head(backbone)

    if order == "in the scope" and strategy is not None:
        with strategy.scope():
            model = build()
    else:
        model = build()
        if strategy is not None:
            unidist.parallelize(model, strategy)
    if order == "after":
        change(model, kind)
    model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
    x, y = zoo.inputs(model), np.random.default_rng(5).normal(size=(zoo.ROWS, 3)).astype("float32")
    losses = []
    for _ in range(STEPS):
        with unidist.ledger() as book:
            losses.append(float(model.train_on_batch(x, y)))
    weights = [keras.ops.convert_to_numpy(v) for v in model.weights]
    return zoo.Trained(model, losses, weights), Counter((e.op, e.purpose, e.bytes) for e in book.events)


@functools.cache
def alone(kind: str, after: bool) -> zoo.Trained:
    return trained(kind, None, "after" if after else "before")[0]


def check(kind: str, grid: dict[str, int], order: str, zero: int = 0, **compiled: Any) -> Sent:
    found, sent = trained(kind, unidist.ModelParallel(zoo.mesh(grid), zero=zero), order, **compiled)
    zoo.assert_equal(found, alone(kind, order == "after"))
    cut = Counter(row.path.rpartition("/")[2] for row in unidist.describe(found.model).sharded)
    assert cut["kernel"] >= KERNELS
    if kind.startswith("int8") and order != "after":
        assert cut["kernel_scale"] >= 10  # of all columns
    assert len(zoo.rows_of(found.model)) == ROWS_CUT
    assert not [purpose for _, purpose, _ in sent if purpose.endswith("/kernel") or "no rule" in purpose]
    return sent


CASES = [
    (kind, grid, order, 0)
    for kind in ("int8", "float8", "int8 and low rank")
    for grid in GRIDS
    for order in unless_all({"2": ("after",), "4": ("before",), "2x2": ("in the scope",)}[grid], ORDERS)
]


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize(
    ("kind", "grid", "order", "zero"),
    [*CASES, ("int8 and low rank", "2x2", "before", 1), ("float8", "2x2", "after", 3)],
)
def test_kernels_are_cut_and_train_as_on_one_device(kind: str, grid: str, order: str, zero: int) -> None:
    check(kind, GRIDS[grid], order, zero)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("ranks", [2, 4])
def test_int8_sends_what_the_plain_kernels_send_and_the_largest_values(ranks: int) -> None:
    plain, sent = check("", {"model": ranks}, "before"), check("int8", {"model": ranks}, "before")
    largest = Fraction((ranks - 1) * zoo.ROWS * zoo.LENGTH * 4)
    more = sent - plain
    assert {(op, number) for op, _, number in more} == {("all_gather", largest)}
    assert sum(more.values()) == ROWS_CUT
    assert sum(plain.values()) + ROWS_CUT == sum(sent.values())


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_adapters_are_saved_as_one_device_saves_them(tmp_path: Any) -> None:
    """And are loaded on one device, and where kernels are cut."""
    cut = unidist.ModelParallel(zoo.mesh({"model": 2}))
    path = str(tmp_path / "adapters.lora.h5")
    saved = with_adapters(cut, STEPS)
    saved.save_lora_weights(path)
    for strategy in (None, cut):
        loaded = with_adapters(strategy, 0)
        assert any(np.abs(a - b).max() > 1e-5 for a, b in zip(adapters(loaded), adapters(saved), strict=True))
        loaded.load_lora_weights(path)
        for a, b in zip(adapters(loaded), adapters(saved), strict=True):
            np.testing.assert_array_equal(a, b)


def with_adapters(strategy: Any, steps: int) -> Any:
    """Returns the backbone of a model that has made some steps."""
    keras.utils.set_random_seed(7)
    backbone = zoo.M.LlamaBackbone(**SIZES)
    change(backbone, "int8 and low rank")
    model = zoo.with_head(backbone)
    if strategy is not None:
        unidist.parallelize(model, strategy)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    for _ in range(steps):
        model.train_on_batch(zoo.inputs(model), np.ones((zoo.ROWS, 3), "float32"))
    return backbone


def adapters(backbone: Any) -> list[np.ndarray]:
    layers = [layer for layer in backbone._flatten_layers() if getattr(layer, "lora_enabled", False)]
    return [keras.ops.convert_to_numpy(v) for layer in layers for v in (layer.lora_kernel_a, layer.lora_kernel_b)]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "compiled"), [("int8", False), ("float8", False), ("int8", True)])
def test_in_processes(kind: str, compiled: bool, processes: ProcessWorld) -> None:
    processes.call(in_processes, kind, compiled)


def in_processes(kind: str, compiled: bool) -> None:
    check(kind, {"model": 2}, "before", jit_compile=compiled)

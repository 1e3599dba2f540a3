"""keras_hub's backbones with sequences cut over an axis of contexts: equal to one device, none named anywhere."""

from __future__ import annotations

import contextlib
from collections import Counter
from fractions import Fraction
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import torch

import unidist
from tests.keras.hub import zoo
from tests.support.sampling import unless_all
from tests.support.saving import Held, saved_bytes
from unidist.backends.torch.sharded.masks import Masks
from unidist.errors import ArgumentError, CapabilityError, MeshError
from unidist.keras.records import model_record

# LENGTH is 6: on 4 devices parts are 2, 2, 2 and 0 places.
EVERY = [(name, n) for name in zoo.BACKBONES for n in (2, 4)]
GRIDS: list[dict[str, int]] = [{"data": 2, "context": 2}, {"context": 2, "model": 2}]


def strategy(sizes: dict[str, int], **more: Any) -> unidist.ModelParallel:
    return unidist.ModelParallel(zoo.mesh(sizes), **more)


@pytest.mark.parametrize(("name", "ranks"), unless_all([EVERY[2 * k + k % 2] for k in range(len(EVERY) // 2)], EVERY))
def test_a_backbone_trains_as_on_one_device(name: str, ranks: int) -> None:
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES[name], strategy({"context": ranks}))
    zoo.assert_equal(found, zoo.alone(name))
    if name == "vit":  # its images are cut along their height, and a convolution takes whole ones
        assert "operation conv2d" in unidist.describe(found.model).why
        return
    sums = [e for e in traffic.events if e.purpose == "weights on parts of the sequence"]
    assert [e.op for e in sums] == ["all_reduce"] * zoo.STEPS
    assert any(e.op in ("all_to_all", "reduce_scatter") for e in traffic.events)


@pytest.mark.parametrize(
    ("name", "sizes"), [("bert", GRIDS[1]), ("llama gqa", {"data": 2, "context": 2, "model": 2})], ids=str
)
def test_beside_other_axes(name: str, sizes: dict[str, int]) -> None:
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES[name], strategy(sizes, zero=3 if "data" in sizes else 0))
    zoo.assert_equal(found, zoo.alone(name))
    # Nothing that a model axis cuts is gathered for it.
    assert {e.axes for e in traffic.events if e.purpose == "contexts"} == {("context",)}
    if "model" not in sizes:
        return
    # The sum of a row layer is of this device's places alone.
    layers = {name for name in zoo.rows_of(found.model) if name.startswith("transformer_layer")}
    rows = [e for e in traffic.events if e.purpose in layers and e.op == "all_reduce" and e.axes == ("model",)]
    places = sizes.get("data", 1) * sizes["context"]
    assert {e.bytes for e in rows} == {zoo.ROWS * zoo.LENGTH * zoo._SIZES["hidden_dim"] * 4 / places}


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_attention(ranks: int) -> None:
    """Queries, keys, values and what comes are turned, each of u bytes: u (n - 1) / n^2. Gathered, keys and values send
    u (n - 1) / n each. Backward sends as much. (keras_hub repeats grouped keys before attention.)"""
    layers, steps = 2, zoo.STEPS
    u = zoo.ROWS * zoo.LENGTH * zoo._SIZES["hidden_dim"] * 4
    sent = {}
    for attention in ("ulysses", "gather", "ring"):
        with unidist.ledger() as traffic:
            zoo.train(
                lambda: zoo.BACKBONES["llama gqa"](num_query_heads=6, num_key_value_heads=6, hidden_dim=24),
                strategy({"context": ranks}, attention=attention),
            )
        large = [e for e in traffic.events if e.purpose == "contexts" and e.bytes > u / 8]
        sent[attention] = Counter(e.op for e in large), sum(e.bytes for e in large)
    u = u * 24 // 16
    n = Fraction(ranks - 1, ranks)
    assert sent["ulysses"] == (Counter(all_to_all=8 * layers * steps), 8 * layers * steps * u * n / ranks)
    halves = Counter(all_gather=2 * layers * steps, reduce_scatter=2 * layers * steps)
    assert sent["gather"] == (halves, 4 * layers * steps * u * n)
    # Keys and values go round, and round again with their gradients: 2 u / n at a time.
    assert sent["ring"] == (Counter(permute=3 * (ranks - 1) * layers * steps), 6 * layers * steps * u * n)


def test_backward_keeps_a_part_of_the_activations() -> None:
    """At most 1.15 / n of what one device keeps, masks included."""
    ranks, length = 4, unless_all(1024, 4096)
    sizes = {"hidden_dim": 64, "intermediate_dim": 128}
    x = {name: torch.ones((1, length), dtype=torch.int32) for name in ("token_ids", "padding_mask")}
    kept: dict[str, int] = {}
    for attention in ("ulysses", "gather", "ring"):
        chosen = strategy({"context": ranks}, attention=attention)
        model = zoo.train(lambda: zoo.BACKBONES["llama gqa"](**sizes), chosen, steps=1).model
        engine: Any = model_record.of(model).engine
        kept[attention] = engine.world.run(lambda frame, model=model: kept_bytes(model, x))
    with zoo.quietly():
        one = kept_bytes(zoo.with_head(zoo.BACKBONES["llama gqa"](**sizes)), x)
    assert kept["ulysses"] <= 1.15 / ranks * one
    assert kept["ring"] <= 1.15 / ranks * one
    assert kept["gather"] <= 1.25 / ranks * one  # the keys and values of all places


@pytest.mark.parametrize(
    ("sizes", "attention", "queries"), [({"context": 4}, "ulysses", 1), ({"context": 2, "model": 2}, "gather", 2)]
)
def test_what_backward_keeps_is_planned(sizes: dict[str, int], attention: str, queries: int) -> None:
    """To the byte: both layers' mask, of all keys and one of so many parts of the queries, is kept once, as bytes."""
    length, wide = 64, {"hidden_dim": 64, "intermediate_dim": 128}
    chosen = strategy(sizes, attention=attention)
    model = zoo.train(lambda: zoo.BACKBONES["llama gqa"](**wide), chosen, steps=1).model
    x = {name: torch.ones((1, length), dtype=torch.int32) for name in ("token_ids", "padding_mask")}
    weights = [part for variable in model.variables for part in variable._storage.parameters()]
    engine: Any = model_record.of(model).engine
    with mock.patch.object(Masks, "keeping", return_value=contextlib.nullcontext()):
        _, saved = engine.world.run(lambda frame: saved_bytes(lambda: model(x, training=True), weights))
    plan, one = (
        unidist.plan(model, unidist.Mesh(mesh), batch=1, sequence=length, attention=attention)
        for mesh in (sizes, {"data": 1})
    )
    pairs = length * length // queries
    assert plan.activation_bytes_per_device == saved - 2 * 4 * pairs + pairs
    assert plan.activation_bytes_per_device < 1.15 / sizes["context"] * one.activation_bytes_per_device


@pytest.mark.parametrize(("zero", "attention"), [(1, "auto"), (3, "auto"), (3, "ring")])
def test_each_collective_is_planned(zero: int, attention: Any) -> None:
    """But the sums of one number, by which a loss adds up places."""
    sizes = {"data": 2, "context": 2}
    model = zoo.train(zoo.BACKBONES["bert"], strategy(sizes, zero=zero, attention=attention), steps=1).model
    with unidist.ledger() as traffic:
        model.train_on_batch(zoo.inputs(model), np.zeros((zoo.ROWS, 3), "float32"))
    options: dict[str, Any] = {"zero": zero, "attention": attention}
    plan = unidist.plan(model, unidist.Mesh(sizes), batch=zoo.ROWS, sequence=zoo.LENGTH, **options)
    planned, sent = (
        Counter((e.op, e.bytes) for e in ledger.events if e.axes == ("context",) and e.bytes > 4)
        for ledger in (plan.predicted, traffic)
    )
    assert planned == sent


@pytest.mark.parametrize("sizes", [{"context": 4}, *GRIDS], ids=str)
@pytest.mark.parametrize("name", ["bart", "llama gqa"])
def test_keys_go_round(name: str, sizes: dict[str, int]) -> None:
    """Also those of an encoder, which a decoder's queries meet."""
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES[name], strategy(sizes, attention="ring"))
    zoo.assert_equal(found, zoo.alone(name))
    round_trips = [e for e in traffic.events if e.op == "permute"]
    layers = {"bart": 6, "llama gqa": 2}[name]
    assert len(round_trips) == 3 * (sizes["context"] - 1) * layers * zoo.STEPS
    assert {e.axes for e in round_trips} == {("context",)}


def test_attention_step_by_step_does_not_go_round() -> None:
    with pytest.raises(CapabilityError, match=r"attention='ring': a product of tensors .* call where dropout=0"):
        zoo.train(zoo.BACKBONES["t5"], strategy({"context": 2}, attention="ring"))


def test_arrays_of_one_batch_are_cut() -> None:
    """Which a functional model is given as they are."""
    model = zoo.train(zoo.BACKBONES["bert"], strategy({"context": 2}), steps=1).model
    with unidist.ledger() as traffic:
        model.train_on_batch(zoo.inputs(model), np.zeros((zoo.ROWS, 3), "float32"))
    assert traffic.bytes(purpose="weights on parts of the sequence")


def kept_bytes(model: keras.Model, x: dict[str, torch.Tensor]) -> int:
    """Bytes that live behind a forward pass."""
    with Held() as held:
        out = model(x, training=True)
    assert out.requires_grad
    return held.now


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"attention": "rings"}, ArgumentError, "attention='rings': give one of 'auto', 'ulysses', 'gather', 'ring'"),
        ({"sequence_parallel": True}, CapabilityError, "both cut sequences"),
        ({"data_axis": "context"}, MeshError, "cannot be both a context and another axis"),
        ({"context_axis": "time"}, MeshError, "unknown axis 'time'"),
    ],
)
def test_what_does_not_go_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        strategy({"data": 2, "context": 2}, **options)


def test_a_mesh_without_rows_and_then_one_with_rows() -> None:
    """A loss that contexts carry, and then one that rows carry: torch's autograd is served for both."""
    for sizes in ({"context": 2}, {"data": 2, "context": 2}):
        found = zoo.train(zoo.BACKBONES["bert"], strategy(sizes))
        zoo.assert_equal(found, zoo.alone("bert"))


def test_any_axis_may_be_named() -> None:
    found = zoo.train(zoo.BACKBONES["llama gqa"], strategy({"data": 2, "time": 2}, context_axis="time"))
    zoo.assert_equal(found, zoo.alone("llama gqa"))
    assert model_record.of(found.model).engine.distribution.strategy.data_axes == ("data",)

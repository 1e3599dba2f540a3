"""Low-rank kernels (LoRA) under found layouts: a step sends what the plain model's sends, and a sum for each layer that
has them."""

from __future__ import annotations

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

RANK, STEPS = 4, zoo.STEPS
# The heads of this one divide by three too.
SIXES = {**zoo._PLAIN, "num_query_heads": 6, "num_key_value_heads": 6, "hidden_dim": 24, "intermediate_dim": 48}


def backbone(low_rank: bool) -> keras.Model:
    model = zoo.M.LlamaBackbone(**SIXES)
    if low_rank:
        keras.utils.set_random_seed(3)
        model.enable_lora(RANK)
    return model


def trained(low_rank: bool, ranks: int | None) -> tuple[zoo.Trained, Counter[tuple[str, str, Fraction]]]:
    strategy = None if ranks is None else unidist.ModelParallel(unidist.Mesh({"model": ranks}))
    with unidist.ledger() as traffic:
        found = zoo.train(lambda: backbone(low_rank), strategy, steps=STEPS)
    # Weights that are looked at in the end are sent for themselves.
    layers = [e for e in traffic.events if e.purpose.startswith("transformer_layer") and "lora" not in e.purpose]
    return found, Counter((e.op, e.purpose, e.bytes) for e in layers)


def check(ranks: int) -> None:
    found, sent = trained(True, ranks)
    zoo.assert_equal(found, trained(True, None)[0])
    assert {row.path.rpartition("/")[2] for row in unidist.describe(found.model).sharded} >= {"kernel", "lora_kernel_a"}
    _, plain = trained(False, ranks)
    # Nothing below the first block is trained, so its input needs no gradient.
    first = "transformer_layer_0/self_attention/query"
    assert {purpose for _, purpose, _ in (plain - sent)} == {first}
    layers = [f"transformer_layer_{k}/self_attention/{name}" for k in (0, 1) for name in ("query", "value")]
    size = RANK * (SIXES["hidden_dim"] // SIXES["num_query_heads"]) * 4
    summed = Fraction(2 * (ranks - 1) * size, ranks)
    assert sent - plain == Counter({("all_reduce", layer, summed): STEPS for layer in layers})


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("ranks", unless_all([3], [2, 3]))  # two are in processes
def test_a_step_sends_one_sum_more_for_each_layer(ranks: int) -> None:
    unidist.use("sim", devices=ranks)
    check(ranks)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_kernels_that_are_added_later_lie_as_the_kernel_does() -> None:
    def train(strategy: Any) -> zoo.Trained:
        found = zoo.train(lambda: backbone(False), strategy, steps=1)
        keras.utils.set_random_seed(3)
        for layer in found.model._flatten_layers():
            if layer.name in ("query", "attention_output"):
                layer.enable_lora(RANK)
        found.model.compile(keras.optimizers.SGD(0.1), "mse")
        y = np.random.default_rng(5).normal(size=(zoo.ROWS, 3)).astype("float32")
        losses = [float(found.model.train_on_batch(zoo.inputs(found.model), y)) for _ in range(STEPS)]
        return zoo.Trained(found.model, losses, [keras.ops.convert_to_numpy(v) for v in found.model.weights])

    unidist.use("sim", devices=2)
    found = train(unidist.ModelParallel(unidist.Mesh({"model": 2})))
    zoo.assert_equal(found, train(None))
    layouts = {row.path: row.layout for row in unidist.describe(found.model).sharded}
    layer = "transformer_layer_0/self_attention"
    assert layouts[f"{layer}/query/lora_kernel_a"] == layouts[f"{layer}/query/kernel"]
    assert layouts[f"{layer}/attention_output/lora_kernel_a"] == layouts[f"{layer}/attention_output/kernel"]
    assert len(zoo.rows_of(found.model)) == 4


@pytest.mark.parametrize("rehearsed", [True, False])
def test_the_plan_predicts_them(rehearsed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rehearsed:
        monkeypatch.setattr("unidist.keras.torch.driver.rehearse", lambda *step: "a compiler chooses")
    unidist.use("sim", devices=2)
    mesh = unidist.Mesh({"model": 2})
    plans = [
        unidist.plan(zoo.with_head(backbone(low_rank)), mesh, batch=zoo.ROWS, sequence=zoo.LENGTH)
        for low_rank in (False, True)
    ]
    plain, added = (Counter((e.op, e.purpose, e.bytes) for e in plan.predicted.events) for plan in plans)
    # Nothing below the first block is trained, so its input needs no gradient.
    first = {"transformer_layer_0/self_attention/query"} if rehearsed else set()
    assert {why for _, why, _ in plain - added if why != "gradients"} == first
    assert sum(count for (_, why, _), count in (added - plain).items() if why != "gradients") == 4


@pytest.mark.processes
def test_in_processes(processes: ProcessWorld) -> None:
    processes.call(check, 2)

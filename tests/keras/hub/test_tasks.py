"""Tasks of keras_hub under tensor parallelism: training and generating."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest

import unidist
from tests import preloaded
from tests.keras.hub import tasks, writing, zoo
from tests.support.sampling import each_value
from tests.visible import QUICK_JAX
from unidist.testing.processes import ProcessWorld


@cache
def alone(kind: str, sampler: str = "greedy", *, fitted: bool = False) -> np.ndarray:
    """What one device writes, for all tests that compare with it."""
    return np.asarray(tasks.generate(kind, None, _seeded(sampler), fitted=fitted)[0])


def test_a_classifier_trains() -> None:
    found = tasks.train(tasks.classifier, zoo.strategy("bert", 4), per_token=False)
    zoo.assert_equal(found, tasks.train(tasks.classifier, None, per_token=False))
    assert len(zoo.rows_of(found.model)) == 4


@pytest.mark.parametrize("kind", ["gpt2", "llama gqa"])
def test_a_causal_model_trains(kind: str) -> None:
    """Its table makes the logits too, and the padding is weighted away."""
    found = tasks.train(lambda: tasks.causal(kind), zoo.strategy(kind, 4), per_token=True)
    zoo.assert_equal(found, tasks.train(lambda: tasks.causal(kind), None, per_token=True))
    # Of fewer key heads than devices attention gives other parts than its row takes.
    assert len(zoo.rows_of(found.model)) == (4 if kind == "gpt2" else 2)


# Gemma 3's cache is a tuple of arrays, of fewer heads than devices here.
CASES = [
    *((kind, "greedy") for kind in ("gpt2", "llama gqa", "gemma mqa", "gemma3")),
    ("gpt2", "top_k"),
    ("llama gqa", "beam"),
]


@pytest.mark.parametrize(("kind", "sampler"), CASES)
def test_generated_tokens_are_those_of_one_device(kind: str, sampler: str) -> None:
    wanted = alone(kind, sampler)
    with unidist.ledger() as traffic:
        found, model = tasks.generate(kind, zoo.strategy(kind, 4), _seeded(sampler))
    np.testing.assert_array_equal(found, wanted)
    assert len(np.unique(wanted)) > 8
    assert unidist.describe(model).sharded
    assert any("attention" in e.purpose for e in traffic.events)
    # Asked again, a sampler without chance gives the same tokens.
    if sampler != "top_k":
        again = model.generate(tasks.prompt(kind), stop_token_ids=None)["token_ids"]
        np.testing.assert_array_equal(again, wanted)


def _seeded(sampler: str) -> str | keras_hub.samplers.Sampler:
    return keras_hub.samplers.TopKSampler(k=5, seed=2) if sampler == "top_k" else sampler


def _noted(kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What calls with a cache have given of one, from here on."""
    caches: list[Any] = []
    original = kind.call_with_cache

    def noting(*given: Any, **named: Any) -> Any:
        *others, cache = original(*given, **named)
        caches.append(cache)
        return *others, cache

    monkeypatch.setattr(kind, "call_with_cache", noting)
    return caches


@pytest.mark.parametrize("kind", ["llama gqa", "gemma3"])
def test_each_device_keeps_the_cache_of_its_heads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = 2
    wanted, model = tasks.generate(kind)
    caches = _noted(type(model), monkeypatch)
    found, _ = tasks.generate(kind, zoo.strategy(kind, ranks))
    np.testing.assert_array_equal(found, wanted)
    held = keras.tree.flatten(caches)
    assert held
    assert all(x.local.shape[-2] * ranks == x.shape[-2] for x in held)


def test_a_token_costs_two_all_reduces_a_block_and_the_cache_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = tasks.generate("gpt2", zoo.strategy("gpt2", 4))
    caches = _noted(type(model), monkeypatch)
    with unidist.ledger() as traffic:
        model.generate(tasks.prompt(), stop_token_ids=None)
    # The prompt, and five tokens: two blocks' two rows, the table, and the logits that are joined.
    assert Counter(e.op for e in traffic.events) == {"all_reduce": 6 * 5, "all_gather": 6}
    assert {cache.local.shape[-2] for cache in caches} == {1}


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_float16"])
def test_low_precision_generates(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        tokens, _ = tasks.generate("llama mqa", zoo.strategy("llama mqa", 4))
    finally:
        keras.config.set_dtype_policy("float32")
    assert len(np.unique(tokens)) > 4


class ReadsCache(zoo.M.GPT2CausalLM):  # type: ignore[misc]
    """Looks at all heads' keys, which no rank has alone."""

    def call_with_cache(self, token_ids, cache, cache_update_index):  # type: ignore[no-untyped-def]
        logits, hidden, cache = super().call_with_cache(token_ids, cache, cache_update_index)
        return logits + 100 * keras.ops.mean(cache), hidden, cache


class ReadsBetween(zoo.M.GPT2CausalLM):  # type: ignore[misc]
    """With a cache, its last block has another activation than without one: one of all features."""

    def call_with_cache(self, token_ids, cache, cache_update_index):  # type: ignore[no-untyped-def]
        block = self.backbone.transformer_layers[-1]
        inner = block._feedforward_output_dense
        original = inner.call
        object.__setattr__(inner, "call", lambda x: original(keras.ops.softmax(x)))
        try:
            return super().call_with_cache(token_ids, cache, cache_update_index)
        finally:
            object.__setattr__(inner, "call", original)


@pytest.mark.parametrize("kind", [ReadsCache, ReadsBetween])
def test_a_call_with_a_cache_may_do_otherwise(kind, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(zoo.M, "GPT2CausalLM", kind)
    wanted, _ = tasks.generate("gpt2")
    found, model = tasks.generate("gpt2", zoo.strategy("gpt2", 4))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(model.generate(tasks.prompt(), stop_token_ids=None)["token_ids"], wanted)


def test_low_rank_kernels_added_between_generating_and_training() -> None:
    """They go by rules, with each rank's heads and their cache."""

    def tune(strategy: unidist.ModelParallel | None) -> zoo.Trained:
        _, model = tasks.generate("llama gqa", strategy)
        keras.utils.set_random_seed(9)
        for layer in model._flatten_layers():
            if layer.name in ("query", "value"):
                layer.enable_lora(2)
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(True), sampler="greedy")
        x = zoo.inputs(model)
        losses = [float(model.train_on_batch(x, x["token_ids"])[0]) for _ in range(3)]
        tokens = np.asarray(model.generate(tasks.prompt(), stop_token_ids=None)["token_ids"])
        return zoo.Trained(model, [*losses, *tokens.ravel()], [np.asarray(v) for v in model.weights])

    found = tune(zoo.strategy("llama gqa", 2))
    zoo.assert_equal(found, tune(None))
    assert len(zoo.rows_of(found.model)) == 4
    said = {path.split("/")[-1]: why for path, why in unidist.describe(found.model).why.items()}
    assert said["value"] == "column: its own operations go by rules, for it has low-rank kernels (LoRA)"


@pytest.mark.parametrize("sampler", ["greedy", "beam"])
def test_prompts_that_a_scope_lays_out(sampler: str) -> None:
    tasks.check_prompts_of_a_scope(sampler)


def test_a_trained_model_generates() -> None:
    """Stored in parts, and cut."""
    wanted = alone("gpt2", fitted=True)
    for strategy in (zoo.strategy("gpt2", 2), unidist.DataParallel(zero=3)):
        found, model = tasks.generate("gpt2", strategy, fitted=True)
        np.testing.assert_array_equal(found, wanted)
        assert unidist.describe(model).sharded


KINDS, SIZES = ("gpt2", "llama gqa", "gemma mqa", "gemma3"), ("context", "data and context")


@pytest.mark.parametrize(("kind", "axes"), each_value(list(itertools.product(KINDS, SIZES))))
def test_a_model_that_contexts_trained_generates(kind: str, axes: str) -> None:
    sizes = {"context": 2} if axes == "context" else {"data": 2, "context": 2}
    wanted = alone(kind, fitted=True)
    with unidist.ledger() as traffic:
        found, model = tasks.generate(kind, unidist.ModelParallel(zoo.mesh(sizes)), fitted=True)
    np.testing.assert_array_equal(found, wanted)
    assert "weights on parts of the sequence" in {e.purpose for e in traffic.events}
    again = model.generate(tasks.prompt(kind), stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(again, wanted)


def test_an_encoder_and_a_decoder_generate() -> None:
    with unidist.ledger() as traffic:
        found = tasks.translate(zoo.strategy("bart", 4))
    np.testing.assert_array_equal(found, tasks.translate())
    assert any("attention" in e.purpose for e in traffic.events)


@pytest.mark.processes
def test_generating_in_two_processes(processes: ProcessWorld) -> None:
    processes.call(tasks.check_generating, 2, True)


@pytest.mark.processes
def test_prompts_that_a_scope_lays_out_in_two_processes(processes: ProcessWorld) -> None:
    processes.call(tasks.check_prompts_of_a_scope, "greedy")


@pytest.mark.processes
def test_backbones_in_two_processes(processes: ProcessWorld) -> None:
    processes.call(tasks.check_backbones)


@pytest.mark.processes
def test_the_first_process_writes_and_all_wait(processes: ProcessWorld, tmp_path: Path) -> None:
    writing.check_writing(processes, tmp_path)


@pytest.mark.processes
def test_a_writer_that_fails_tells_the_others(processes: ProcessWorld, tmp_path: Path) -> None:
    writing.check_failing(processes, tmp_path)


@pytest.mark.processes
def test_generating_on_jax() -> None:
    """JAX's compiler partitions the weights; generating is Keras's own program."""
    env, preload = {"KERAS_BACKEND": "jax", **QUICK_JAX}, preloaded.KERAS["jax"]
    with ProcessWorld(
        1, launcher=None, env=env, setup=tasks.start, setup_args=("jax", 2), timeout=200, preload=preload
    ) as world:
        world.call(tasks.check_generating, 2, False)
        assert "uneven=True is for torch" in world.call(tasks.uneven_is_refused)[0]

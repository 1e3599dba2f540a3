"""Tasks of keras_hub under tensor parallelism: fit and generate."""

from __future__ import annotations

import pytest

import numpy as np  # isort: skip

import unidist
from tests.keras.hub import tasks, zoo
from unidist.testing.processes import ProcessWorld


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_classifier_fits(ranks: int) -> None:
    found = tasks.fit(tasks.classifier, zoo.strategy("bert", ranks), per_token=False)
    zoo.assert_equal(found, tasks.fit(tasks.classifier, None, per_token=False))
    assert len(zoo.pairs_of(found.model)) == 4


@pytest.mark.parametrize("kind", ["gpt2", "llama gqa"])
def test_a_causal_model_fits(kind: str) -> None:
    """Its table makes the logits too, and the padding is weighted away."""
    found = tasks.fit(lambda: tasks.causal(kind), zoo.strategy(kind, 4), per_token=True)
    zoo.assert_equal(found, tasks.fit(lambda: tasks.causal(kind), None, per_token=True))
    assert len(zoo.pairs_of(found.model)) == 4


@pytest.mark.parametrize("sampler", ["greedy", "top_k", "beam"])
@pytest.mark.parametrize("kind", ["gpt2", "llama gqa", "llama mqa", "gemma mqa"])
def test_generated_tokens_are_those_of_one_device(kind: str, sampler: str) -> None:
    wanted, _ = tasks.generate(kind, None, _seeded(sampler))
    with unidist.ledger() as traffic:
        found, model = tasks.generate(kind, zoo.strategy(kind, 4), _seeded(sampler))
    np.testing.assert_array_equal(found, wanted)
    assert unidist.describe(model).sharded
    assert any(e.purpose == "generate" for e in traffic.events)
    # Asked again it goes on where it was: the tokens of another call are the same for a sampler without chance.
    if sampler != "top_k":
        again = model.generate(tasks.prompt(), stop_token_ids=None)["token_ids"]
        np.testing.assert_array_equal(again, wanted)


def _seeded(sampler: str):  # type: ignore[no-untyped-def]
    import keras_hub

    return keras_hub.samplers.TopKSampler(k=5, seed=2) if sampler == "top_k" else sampler


def test_a_fitted_model_generates() -> None:
    wanted, _ = tasks.generate("gpt2", fitted=True)
    found, _ = tasks.generate("gpt2", zoo.strategy("gpt2", 4), fitted=True)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.processes
def test_two_processes() -> None:
    with ProcessWorld(2, env={"KERAS_BACKEND": "torch"}, setup=tasks.start, timeout=200) as world:
        world.call(tasks.in_a_process)

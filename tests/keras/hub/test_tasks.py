"""Tasks of keras_hub under tensor parallelism: training and generating."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import keras_hub
import numpy as np
import pytest

import unidist
from tests.keras.hub import tasks, zoo
from unidist.testing.processes import ProcessWorld


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_classifier_trains(ranks: int) -> None:
    found = tasks.train(tasks.classifier, zoo.strategy("bert", ranks), per_token=False)
    zoo.assert_equal(found, tasks.train(tasks.classifier, None, per_token=False))
    assert len(zoo.pairs_of(found.model)) == 4


@pytest.mark.parametrize("kind", ["gpt2", "llama gqa"])
def test_a_causal_model_trains(kind: str) -> None:
    """Its table makes the logits too, and the padding is weighted away."""
    found = tasks.train(lambda: tasks.causal(kind), zoo.strategy(kind, 4), per_token=True)
    zoo.assert_equal(found, tasks.train(lambda: tasks.causal(kind), None, per_token=True))
    assert len(zoo.pairs_of(found.model)) == 4


CASES = [
    *((kind, "greedy") for kind in ("gpt2", "llama gqa", "llama mqa", "gemma mqa")),
    ("gpt2", "top_k"),
    ("llama gqa", "beam"),
]


@pytest.mark.parametrize(("kind", "sampler"), CASES)
def test_generated_tokens_are_those_of_one_device(kind: str, sampler: str) -> None:
    wanted, _ = tasks.generate(kind, None, _seeded(sampler))
    with unidist.ledger() as traffic:
        found, model = tasks.generate(kind, zoo.strategy(kind, 4), _seeded(sampler))
    np.testing.assert_array_equal(found, wanted)
    assert unidist.describe(model).sharded
    assert any(e.purpose == "generate" for e in traffic.events)
    # Asked again, a sampler without chance gives the same tokens.
    if sampler != "top_k":
        again = model.generate(tasks.prompt(), stop_token_ids=None)["token_ids"]
        np.testing.assert_array_equal(again, wanted)


def _seeded(sampler: str) -> str | keras_hub.samplers.Sampler:
    return keras_hub.samplers.TopKSampler(k=5, seed=2) if sampler == "top_k" else sampler


def test_a_trained_model_generates() -> None:
    wanted, _ = tasks.generate("gpt2", fitted=True)
    found, _ = tasks.generate("gpt2", zoo.strategy("gpt2", 2), fitted=True)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("fitted", [False, True])
def test_a_model_stored_in_parts_generates(fitted: bool) -> None:
    wanted, _ = tasks.generate("gpt2", fitted=fitted)
    found, model = tasks.generate("gpt2", unidist.DataParallel(zero=3), fitted=fitted)
    np.testing.assert_array_equal(found, wanted)
    assert unidist.describe(model).sharded


def test_an_encoder_and_a_decoder_generate() -> None:
    with unidist.ledger() as traffic:
        found = tasks.translate(zoo.strategy("bart", 4))
    np.testing.assert_array_equal(found, tasks.translate())
    assert any(e.purpose == "generate" for e in traffic.events)


# Strings go through tf.data: in processes of their own, which see TensorFlow.
SEES_TENSORFLOW = {"PYTHONPATH": str(Path(__file__).parents[3]), "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture(scope="module")
def two_processes() -> Iterator[ProcessWorld]:
    env = {**SEES_TENSORFLOW, "KERAS_BACKEND": "torch"}
    with ProcessWorld(2, env=env, setup=tasks.start, setup_args=("torch", 2), timeout=200) as world:
        yield world


@pytest.mark.processes
def test_text_in_two_processes(two_processes: ProcessWorld) -> None:
    two_processes.call(tasks.check_text, ("gpt2",), 2)


@pytest.mark.processes
def test_generating_in_two_processes(two_processes: ProcessWorld) -> None:
    two_processes.call(tasks.check_generating, 2, True)


@pytest.mark.processes
def test_backbones_in_two_processes(two_processes: ProcessWorld) -> None:
    two_processes.call(tasks.check_backbones)


@pytest.mark.processes
def test_text_in_the_simulator() -> None:
    env = {**SEES_TENSORFLOW, "KERAS_BACKEND": "torch"}
    with ProcessWorld(1, launcher=None, env=env, setup=tasks.start, setup_args=("sim", 4), timeout=200) as world:
        world.call(tasks.check_text, ("bert",), 4)


@pytest.mark.processes
def test_generating_on_jax() -> None:
    """JAX's compiler partitions the weights; generating is Keras's own program."""
    flags = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with ProcessWorld(1, launcher=None, env=flags, setup=tasks.start, setup_args=("jax", 2), timeout=200) as world:
        world.call(tasks.check_generating, 2, False)
        assert "uneven=True is for torch" in world.call(tasks.uneven_is_refused)[0]

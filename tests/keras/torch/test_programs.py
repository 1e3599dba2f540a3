"""jit_compile=True: a step is one program of torch.compile, and computes and sends the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import keras
import numpy as np
import pytest

import unidist
from tests import preloaded
from tests.keras.torch import programs
from tests.keras.torch.models import OwnOfPairs
from tests.support.sampling import unless_all
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    with ProcessWorld(
        2, env={"KERAS_BACKEND": "torch"}, setup=programs.start, timeout=200, preload=preloaded.KERAS["torch"]
    ) as found:
        yield found


# They stop at the graph, which is what they ask about: test_whole_steps.py has one that is compiled to the end.
CASES = [
    ("perceptron", "data", "aot_eager"),
    ("encoder", "model", "aot_eager"),
    *unless_all(
        [],
        [
            ("perceptron", "shards", "aot_eager"),
            ("perceptron", "model", "aot_eager"),
            ("perceptron", "model", "inductor"),
            ("perceptron", "shards", "inductor"),
            ("encoder", "shards", "aot_eager"),
            ("encoder", "sequence", "aot_eager"),
        ],
    ),
]


@pytest.mark.parametrize(("name", "kind", "compiler"), CASES)
def test_one_graph_of_a_step_without_a_break(world: ProcessWorld, name: str, kind: str, compiler: str) -> None:
    """To train: one of full batches, and one of ragged ones."""
    shapes = 2 if programs.ROWS[name] % programs.BATCH else 1
    for why, count, graphs, breaks in world.call(programs.compare, name, kind, compiler):
        assert why == {}
        assert count == shapes
        assert breaks == {}
        assert graphs["unique_graphs"] == shapes


def test_what_is_stored_as_shards_is_gathered_again_for_backward(world: ProcessWorld) -> None:
    """The first kernel is no part of its gradient, and the last one is still there. One more is on its way."""
    assert world.call(programs.held_at_once) == [(4 + 2, 2)] * 2


def test_a_layer_may_read_another_ones_shards(world: ProcessWorld) -> None:
    for found, wanted, why in world.call(programs.reading_anothers):
        assert why == {}
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_loss_of_pairs_of_rows_in_a_step_of_ones_own_is_that_of_all(world: ProcessWorld) -> None:
    for found, wanted, said in world.call(programs.of_pairs_of_rows):
        assert said == []
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_layer_that_trains_itself_is_compiled_too(world: ProcessWorld) -> None:
    for found, wanted, sent in world.call(programs.of_a_layer_that_trains):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert sent > 0


def test_a_model_with_a_torch_module_runs_eagerly_and_says_so(world: ProcessWorld) -> None:
    texts = []
    for found, wanted, said in world.call(programs.with_a_torch_module, "data", True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        texts += said
    (text,) = texts  # the first process's
    assert "has a torch module, so it runs eagerly" in text


def test_a_torch_module_is_not_cut_where_layouts_are_found(world: ProcessWorld) -> None:
    """It reads its own parameters, so parts would train by no gradient."""
    for found, wanted, _ in world.call(programs.with_a_torch_module, "found", False):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", ["shards", "ruled"])
def test_a_torch_module_that_would_be_cut_is_refused(world: ProcessWorld, kind: str) -> None:
    for outcome in world.outcomes(programs.with_a_torch_module, kind, False).values():
        assert outcome.failure is not None
        assert "layer 'inner' wraps a torch module, which reads its own parameters" in str(outcome.failure)


@pytest.mark.parametrize("kind", [keras.Sequential, OwnOfPairs])
def test_the_simulator_runs_it_eagerly_and_says_so_once(kind: type[keras.Sequential]) -> None:
    def trained(jit_compile: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with unidist.DataParallel().scope():
            model = kind([keras.layers.Input((4,)), keras.layers.Dense(3)])
            model.compile("sgd", "mse", jit_compile=jit_compile)
        x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
        for _ in range(2):
            model.fit(x, x[:, :3].copy(), batch_size=4, verbose=0, shuffle=False)
        assert model.jit_compile is jit_compile
        return [np.asarray(v) for v in model.weights]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trained(True)
    assert sum("eagerly, with the same numbers" in str(one.message) for one in said) == 1
    for one, other in zip(found, trained(False), strict=True):
        np.testing.assert_array_equal(one, other)

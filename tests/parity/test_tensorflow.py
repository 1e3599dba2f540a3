"""What is particular to Keras on TensorFlow."""

from __future__ import annotations

import pytest

from tests.parity import interplay
from tests.parity.compare import assert_same_logs, assert_same_values
from tests.parity.train import Spec
from tests.parity.worlds import ALONE, DATA_4, GRID, MODEL_4, Alone, Worlds

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("case", "spec"), [("tagger", DATA_4), ("functional", GRID)], ids=str)
def test_where_torch_is_the_reference(case: str, spec: Spec, alone: Alone, worlds: Worlds) -> None:
    """On TensorFlow alone Keras applies Adam to each occurrence of a word; unidist, as Keras on torch, to their sum.
    And there it logs losses of several outputs without the sizes of batches, where the last one is smaller.

    The tagger's recurrent layer is unrolled and its kernels are gathered when read.
    """
    wanted = alone.train("torch", case, numpy_weights=True)
    for result in worlds.train("tensorflow-4", case, spec, numpy_weights=True):
        assert_same_logs(result.logs, wanted.logs)
        assert_same_values(result.weights, wanted.weights)


def test_the_combiner_of_all_reduces_would_break_this_step_without_both_guards() -> None:
    """DTensor's combiner makes this step apply the momentum of the step before; either guard prevents it."""
    for combiner, relay, is_right in (("1", False, False), ("0", False, True), ("1", True, True)):
        with ALONE["tensorflow"].world() as world:
            error = world.call("tests.parity.interplay:combined", combiner, relay)[0]
        assert (error < 1e-5) == is_right, (combiner, relay, error)


@pytest.mark.parametrize("behaviour", interplay.BEHAVIOURS)
def test_behaviour(behaviour: str, worlds: Worlds) -> None:
    worlds.get("tensorflow-4").call(f"tests.parity.interplay:{behaviour}")


def test_layouts_found_automatically_are_refused(worlds: Worlds) -> None:
    kind, text = worlds.get("tensorflow-4").call("tests.parity.interplay:found_automatically")[0]
    assert kind == "CapabilityError"
    assert "layout_map='auto'" in text


def test_an_op_that_dtensor_cannot_run_on_shards_is_named(worlds: Worlds) -> None:
    kind, text = worlds.get("tensorflow-4").call("tests.parity.interplay:without_a_rule")[0]
    assert kind == "CapabilityError", text
    assert "Split" in text, text
    assert "replicated" in text, text


@pytest.mark.parametrize("spec", [MODEL_4], ids=lambda spec: spec.name)
def test_what_was_sent_is_said_to_be_predicted(spec: object, worlds: Worlds) -> None:
    assert worlds.get("tensorflow-4").call("tests.parity.interplay:purposes")[0] == ["train step (predicted)"]

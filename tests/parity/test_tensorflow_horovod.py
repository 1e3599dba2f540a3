"""What is particular to Keras on TensorFlow over Horovod, and programs that DTensor must be right for as well."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.compare import assert_same_values
from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes


def test_models_that_processes_made_apart_begin_with_the_firsts_weights(alone: Alone, worlds: Worlds) -> None:
    wanted = alone.world("tensorflow").call("tests.parity.interplay:made_apart", 0)[0]
    for found in worlds.get("horovod-2-tensorflow").call("tests.parity.interplay:made_apart", None):
        assert_same_values(found, wanted)


@pytest.mark.parametrize("axes", [{"data": 4}, {"host": 2, "device": 2}, {"host": 3, "device": 2}], ids=str)
def test_rows_over_horovod_are_cut_as_they_are_joined(axes: dict[str, int], alone: Alone) -> None:
    """Of two data axes too, where processes would otherwise wait for rows that nobody has."""
    assert alone.world("tensorflow").call("tests.parity.interplay:cut_over_horovod", axes) == [[]]


def test_a_state_of_whole_batches_over_horovod(worlds: Worlds) -> None:
    for kind, message in worlds.get("horovod-2-tensorflow").call("tests.parity.mistakes:stateful_layer"):
        assert kind == "CapabilityError"
        assert "built for, but each of 2 devices gets 3, and no device" in message


@pytest.mark.parametrize("setting", ["tensorflow-4", "horovod-2-tensorflow"])
def test_a_step_may_derive_by_its_inputs(setting: str, alone: Alone, worlds: Worlds) -> None:
    (wanted,) = alone.world("tensorflow").call("tests.parity.strangers:by_inputs", False)
    for found in worlds.get(setting).call("tests.parity.strangers:by_inputs", True):
        assert_same_values(found, wanted)


def test_a_layer_that_is_tried_writes_nothing(alone: Alone, worlds: Worlds) -> None:
    (wanted,) = alone.world("tensorflow").call("tests.parity.strangers:written_by_a_layer", False)
    for found in worlds.get("horovod-2-tensorflow").call("tests.parity.strangers:written_by_a_layer", True):
        assert_same_values(found, wanted)


@pytest.mark.parametrize(
    ("setting", "kind", "zero", "case"),
    [
        *(("horovod-2-tensorflow", "dp", 0, case) for case in ("binary", "classes", "own", "centred", "judging")),
        *(("tensorflow-4", "2x2", 3, case) for case in unless_all(["own"], ["binary", "classes", "own", "centred"])),
    ],
)
def test_crossentropies_know_the_logits_of_probabilities(
    setting: str, kind: str, zero: int, case: str, alone: Alone, worlds: Worlds
) -> None:
    (wanted,) = alone.world("tensorflow").call("tests.keras.saturated:trained", None, 0, case)
    for found in worlds.get(setting).call("tests.keras.saturated:trained", kind, zero, case):
        same(found, wanted)


@pytest.mark.parametrize("setting", ["horovod-2-tensorflow", "tensorflow-4"])
def test_data_whose_length_is_not_known_ends(setting: str, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("tensorflow", "tests.keras.alike:ended", None, 0)
    for found in worlds.get(setting).call("tests.keras.alike:ended", "dp", 0):
        same(found, wanted)


@pytest.mark.parametrize(("name", "setting"), [("clipping", "horovod-2-tensorflow"), ("penalized", "tensorflow-4")])
def test_a_step_of_ones_own_sees_the_gradients_of_all_rows(
    name: str, setting: str, alone: Alone, worlds: Worlds
) -> None:
    wanted = alone.run("tensorflow", "tests.keras.tape:stepped", None, 0, name)
    for found in worlds.get(setting).call("tests.keras.tape:stepped", "dp", 0, name):
        same(found, wanted)


def of_few_numbers(kind: str | None, zero: int) -> dict[str, Any]:
    """Rows that are sparse, of which the last batch has fewer."""
    import tensorflow as tf

    from tests.support import nets
    from tests.support.runs import told

    x, y = nets.rows(10)
    with nets.begun(kind, zero):
        model = nets.crossed(nets.plain(), nets.sgd())
    rows = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x * (x > 0.5)), y)).batch(4)
    return {**model.fit(rows, epochs=2, shuffle=False, verbose=0).history, **told(model)}


def test_sparse_rows_are_cut_as_dense_ones(alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("tensorflow", of_few_numbers, None, 0)
    for found in worlds.get("horovod-2-tensorflow").call(of_few_numbers, "dp", 0):
        same(found, wanted)

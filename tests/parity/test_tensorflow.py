"""What is particular to Keras on TensorFlow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.runs import run
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


@pytest.mark.parametrize("setting", ["tensorflow-4", "tensorflow-2x2"])
@pytest.mark.parametrize("behaviour", interplay.BEHAVIOURS)
def test_behaviour(setting: str, behaviour: str, worlds: Worlds) -> None:
    worlds.get(setting).call(f"tests.parity.interplay:{behaviour}")


def test_data_of_each_process_of_its_own_is_refused(worlds: Worlds) -> None:
    for kind, text in worlds.get("tensorflow-2x2").call("tests.parity.interplay:own_data"):
        assert kind == "CapabilityError"
        assert "auto_shard_dataset=False" in text


def test_processes_seeded_apart_go_on_with_the_first_ones_state(worlds: Worlds) -> None:
    """First weights, shuffling and dropout are then process 0's, as if it had trained alone with its seed."""
    first, second = worlds.get("tensorflow-2x2").call("tests.parity.interplay:seeded_apart")
    assert_same_values(second, first, 0.0)
    assert_same_values(first, worlds.get("tensorflow-4").call("tests.parity.interplay:seeded_apart")[0])


SCRIPT = """
import keras
import numpy as np

import unidist

unidist.use()
mesh = unidist.Mesh({"data": 2, "model": 2})
rules = unidist.LayoutMap(mesh, {"net/up/kernel": (None, "model"), "net/up/bias": ("model",)})
keras.utils.set_random_seed(1)
layers = [keras.Input((16,)), keras.layers.Dense(8, "relu", name="up"), keras.layers.Dense(1, name="head")]
with unidist.ModelParallel(mesh, rules).scope():
    model = keras.Sequential(layers, name="net")
    model.compile("adam", "mse")
rng = np.random.default_rng(0)
x, y = rng.normal(size=(22, 16)).astype("float32"), rng.normal(size=(22, 1)).astype("float32")
with unidist.ledger() as book:
    history = model.fit(x, y, batch_size=8, epochs=2)
assert book.count() > 0 and unidist.describe(model).sharded
model.save("net.keras")
print("process", unidist.process_index(), "of", unidist.process_count(), "sum", model.predict(x, verbose=0).sum())
"""


def test_unidist_run_trains_a_keras_script(alone: Alone, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(["-n", "2", "--backend", "tensorflow", "--devices-per-process", "2", "train.py"], tmp_path)
    assert done.code == 0, done.err
    said = [done.of_rank(rank)[-1].split() for rank in (0, 1)]
    assert [words[:4] for words in said] == [["process", str(rank), "of", "2"] for rank in (0, 1)]
    sums = [float(words[-1]) for words in said]
    wanted = alone.world("tensorflow").call("tests.parity.interplay:sum_of_saved", str(tmp_path / "net.keras"))[0]
    assert sums == pytest.approx([wanted, wanted], rel=1e-5)
    # Only process 0 shows progress.
    assert any("Epoch 1/2" in line for line in done.of_rank(0))
    assert len(done.of_rank(1)) == 1


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

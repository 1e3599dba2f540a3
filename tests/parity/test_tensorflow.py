"""What is particular to Keras on TensorFlow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.launch.runs import run
from tests.parity import interplay
from tests.parity.compare import assert_same_logs, assert_same_values
from tests.parity.train import Spec
from tests.parity.worlds import ALONE, DATA_4, GRID, Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes


def test_losses_of_several_outputs_are_logged_as_on_one_device(alone: Alone, worlds: Worlds) -> None:
    """Keras on TensorFlow logs them without the sizes of batches, of which the last one is smaller."""
    wanted = alone.train("tensorflow", "functional", numpy_weights=True)
    for result in worlds.train("tensorflow-4", "functional", GRID, numpy_weights=True):
        assert_same_logs(result.logs, wanted.logs)
        assert_same_values(result.weights, wanted.weights)


def test_the_combiner_of_all_reduces_would_break_this_step_without_both_guards() -> None:
    """DTensor's combiner makes this step apply the momentum of the step before; either guard prevents it."""
    for combiner, relay, is_right in (("1", False, False), ("0", False, True), ("1", True, True)):
        with ALONE["tensorflow"].world() as world:
            error = world.call("tests.parity.interplay:combined", combiner, relay)[0]
        assert (error < 1e-5) == is_right, (combiner, relay, error)


_BEHAVIOURS = [
    # What processes do, one does: those that are run in two are not compiled for one again.
    *(
        ("tensorflow-4", behaviour)
        for behaviour in interplay.BEHAVIOURS
        if unless_all(behaviour not in interplay.IN_PROCESSES, True)
    ),
    *(("tensorflow-2x2", behaviour) for behaviour in interplay.IN_PROCESSES),
]


@pytest.mark.parametrize(("setting", "behaviour"), _BEHAVIOURS)
def test_behaviour(setting: str, behaviour: str, worlds: Worlds) -> None:
    worlds.get(setting).call(f"tests.parity.interplay:{behaviour}")


@pytest.mark.parametrize(
    ("program", "setting"), [("between_trainings", "tensorflow-2x2"), ("swapped_averages", "tensorflow-4")]
)
def test_outside_of_steps_variables_are_one_devices(program: str, setting: str, alone: Alone, worlds: Worlds) -> None:
    (wanted,) = alone.world("tensorflow").call(f"tests.parity.outside:{program}", False)
    for found in worlds.get(setting).call(f"tests.parity.outside:{program}", True):
        assert_same_values(found, wanted)


@pytest.mark.parametrize(
    "program",
    [
        *("unseeded", "counted_elsewhere", "held_elsewhere", "made_of_its_layers", "epochs_are_counted"),
        "differentiated",
    ],
)
def test_what_the_model_does_not_have(program: str, alone: Alone, worlds: Worlds) -> None:
    (wanted,) = alone.world("tensorflow").call(f"tests.parity.strangers:{program}", False)
    for found in worlds.get("tensorflow-4").call(f"tests.parity.strangers:{program}", True):
        assert_same_values(found, wanted)


@pytest.mark.parametrize(
    ("program", "args", "what", "instead"),
    [
        ("written_by_each", ["added"], "a step writes the tf.Variable", "self.add_weight"),
        ("written_by_each", ["scattered"], "a step writes the tf.Variable", "self.add_weight"),
        ("written_by_each", ["drawn"], "a step draws from a tf.random.Generator", "keras.random.SeedGenerator"),
        ("cropped", [], "a slice between numbers that a step computes", "by dataset.map"),
    ],
    ids=["added", "scattered", "drawn", "cropped"],
)
def test_what_dtensor_would_do_wrong_is_refused(
    program: str, args: list[str], what: str, instead: str, worlds: Worlds
) -> None:
    for kind, text in worlds.get("tensorflow-4").call(f"tests.parity.strangers:{program}", *args):
        assert kind == "CapabilityError"
        assert what in text
        assert instead in text


@pytest.mark.parametrize(
    ("kind", "parts", "uneven"),
    [
        pytest.param("data", [(0, 12), (12, 17)], True, id="data"),
        pytest.param("grid", [(0, 6), (6, 12)], False, id="grid"),
        # Also in "differs" below, where they do not hold the same.
        *unless_all([], [pytest.param("model", [(0, 6), (0, 6)], False, id="model")]),
    ],
)
def test_each_process_is_given_its_own_rows(
    kind: str, parts: list[tuple[int, int]], uneven: bool, worlds: Worlds
) -> None:
    """Parts of different lengths and of one; and where the devices of both processes hold the same rows."""
    for told in worlds.get("tensorflow-2x2").call("tests.parity.interplay:own_data", kind, parts):
        assert told["batch sizes"] > 0
        # Rows are sent only where places get different numbers of them.
        assert ("uneven batches" in told) == uneven
        assert any("train step" in purpose for purpose in told)


def test_processes_seeded_apart_go_on_with_the_first_ones_state(worlds: Worlds) -> None:
    """First weights, shuffling and dropout are then process 0's, as if it had trained alone with its seed."""
    first, second = worlds.get("tensorflow-2x2").call("tests.parity.interplay:seeded_apart")
    assert_same_values(second, first, 0.0)
    assert_same_values(first, worlds.get("tensorflow-4").call("tests.parity.interplay:seeded_apart")[0])


def test_what_a_model_of_ones_own_keeps_as_tensors_is_on_every_mesh(alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("tensorflow", "tests.keras.alike:kept", None, 0)
    same(worlds.get("tensorflow-4").call("tests.keras.alike:kept", "dp", 0)[0], wanted)


def test_it_is_on_the_mesh_without_a_program_too(alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("tensorflow", "tests.keras.alike:adapted", None, 0, True)
    same(worlds.get("tensorflow-4").call("tests.keras.alike:adapted", "dp", 0, True)[0], wanted)


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
x, y = rng.normal(size=(16, 16)).astype("float32"), rng.normal(size=(16, 1)).astype("float32")
with unidist.ledger() as book:
    history = model.fit(x, y, batch_size=8, epochs=2)
assert book.count() > 0 and unidist.describe(model).sharded
model.save("net.keras")
print("process", unidist.process_index(), "of", unidist.process_count(), "sum", model.predict(x, 8, verbose=0).sum())
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


AUTO_4, AUTO_GRID = Spec("auto", (("model", 4),)), Spec("auto", GRID.axes)


# The others in two processes, below.
@pytest.mark.parametrize("case", unless_all(["tagger"], ["mlp_ragged_adam", "conv_norm", "tagger"]))
def test_a_model_without_a_rule_trains_as_one_device(case: str, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.train("tensorflow", case)
    result = worlds.train("tensorflow-4", case, AUTO_GRID)[0]
    assert_same_logs(result.logs, wanted.logs)
    assert_same_values(result.weights, wanted.weights)
    assert any("model" in row.layout for row in result.variables)


@pytest.mark.parametrize(
    ("case", "spec"),
    [
        # Every stage in one process: test_zero.py. Another one in two: tests/promises.
        *unless_all(
            (), [("mlp_ragged_adam", spec) for spec in (replace(GRID, zero=3), AUTO_GRID, replace(DATA_4, zero=1))]
        ),
        ("conv_norm", replace(AUTO_GRID, zero=3)),
    ],
    ids=lambda p: getattr(p, "name", p),
)
def test_sharded_states_and_found_layouts_in_two_processes(case: str, spec: Spec, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.train("tensorflow", case)
    first, second = worlds.train("tensorflow-2x2", case, spec)
    for found in (first, second):
        assert_same_values(found.start, wanted.start, 0.0)
        assert_same_logs(found.logs, wanted.logs)
        assert_same_values(found.weights, wanted.weights)
        assert_same_logs([found.evaluate], [wanted.evaluate])
        assert_same_values(found.predict, wanted.predict)
        assert found.traffic["all_reduce"][1] > 0
    assert first.variables == second.variables
    weights = [row for row in first.variables if row.path in first.weights and len(row.shape) > 1]
    slots = [row for row in first.variables if row.path not in first.weights and len(row.shape) > 1]
    assert any("model" in row.layout for row in weights) == (spec.kind != "data")
    assert all("data" in row.layout for row in slots) == (spec.zero > 0)
    assert all("data" in row.layout for row in weights) == (spec.zero == 3)
    assert_same_values(second.weights, first.weights, 0.0)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        # GPT-2 by rules: test_gpt2.py.
        *unless_all((), (("bert", AUTO_GRID), ("gpt2", AUTO_4), ("bert", replace(GRID, zero=1)))),
        ("llama gqa", replace(AUTO_GRID, zero=3)),
    ],
    ids=lambda p: getattr(p, "name", p),
)
def test_a_transformer_trains_as_one_device(name: str, spec: Spec, alone: Alone, worlds: Worlds) -> None:
    """Layouts found, or the zoo's rules."""
    wanted = alone.world("tensorflow").call("tests.parity.gpt2:train_where_it_divides", None, name)[0]
    found = worlds.get("tensorflow-4").call("tests.parity.gpt2:train_where_it_divides", spec, name)[0]
    assert len(found.losses) == 20
    np.testing.assert_allclose(found.losses, wanted.losses, atol=1e-5, rtol=1e-5)
    assert_same_values(found.weights, wanted.weights)
    cut = sum(row.is_sharded for row in found.variables if row.path in found.weights)
    assert cut >= 0.5 * len(found.weights)


def test_one_line_shards_a_model(worlds: Worlds) -> None:
    told = worlds.get("tensorflow-4").call("tests.parity.interplay:in_one_line")[0]
    assert told["backend"] == "tensorflow"
    assert told["world_size"] == 4
    assert told["sharded_fraction"] > 0.9


def test_an_op_that_dtensor_cannot_run_on_shards_is_named(worlds: Worlds) -> None:
    kind, text = worlds.get("tensorflow-4").call("tests.parity.interplay:without_a_rule")[0]
    assert kind == "CapabilityError", text
    assert "Split" in text, text
    assert "replicated" in text, text


@pytest.mark.parametrize("setting", ["tensorflow-4", "tensorflow-2x2"])
def test_what_was_sent_is_read_from_the_compiled_program(setting: str, worlds: Worlds) -> None:
    """16 -> 8 -> 10 features, 8 rows on a 2 x 2 mesh; the 8 are cut. On CPU DTensor gathers by all-reducing, and among
    two an all-reduce sends as many bytes as it is given."""
    for process, told in enumerate(worlds.get(setting).call("tests.parity.interplay:traffic")):
        first = 2 * process
        model, data = ("all_reduce", ("model",), (first, first + 1)), ("all_reduce", ("data",), (0, 2))
        step = told.pop("train step (compiled)")
        logits, kernel, bias, gathered = (model, 4.0 * 4 * 10), (data, 4.0 * 16 * 4), (data, 4.0 * 4), (model, 4.0 * 8)
        found = [(tuple(rest), size) for *rest, size in step]
        for wanted in (logits, kernel, bias, gathered, (data, 4.0 * 10), (data, 4.0 * 4 * 10)):
            assert wanted in found, found
        predicted = [(tuple(rest), size) for *rest, size in told.pop("predict step (compiled)")]
        # Of four rows, then of two.
        assert predicted == [
            (axis, 4.0 * rows * 10) for rows in (4, 2) for axis, rows in ((model, rows / 2), (data, rows))
        ]
        assert set(told) <= {"random state", "views of the data", "agreement"}


@pytest.mark.parametrize("how", ["eager", "traced"])
def test_what_cannot_be_read_is_predicted_and_says_so(how: str, worlds: Worlds) -> None:
    told = worlds.get("tensorflow-4").call("tests.parity.interplay:traffic", **{how: True})[0]
    assert set(told) == {"train step (predicted)"}

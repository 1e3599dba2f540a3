"""Where a model is made and used, how its steps run, what its data is, what is refused. Made for Keras 3.15.

(What all backends promise: tests/promises.)
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import preloaded
from tests.keras.jax.worlds import virtual, with_tensorflow
from tests.support.comparing import close, same
from unidist.testing.processes import ProcessWorld

RUN = "tests.keras.jax.behaviours:{}".format
PRELOAD = (*preloaded.KERAS["jax"], "tensorflow")


@pytest.fixture(scope="module")
def expected(one: ProcessWorld) -> Any:
    """What one device computes, asked once."""
    return cache(lambda name, *args: one.call(RUN(name), *args)[0])


HOW = ("outside", "compiled outside", "in another thread", "after clear_session")


@pytest.mark.parametrize("how", HOW)
def test_a_model_made_in_a_scope_is_distributed_wherever_it_is_used(
    four: ProcessWorld, expected: Any, how: str
) -> None:
    found = four.call(RUN("entrance"), "2x2", how)[0]
    same(found, expected("entrance", None, how))
    assert found["spread"] == 4
    assert found["sharded"]
    assert found["sent"] > 0


@pytest.mark.parametrize(("kind", "trained_before"), [("dp", False), ("2x2", True)])
def test_a_model_built_before_the_scope_is_placed(
    four: ProcessWorld, expected: Any, kind: str, trained_before: bool
) -> None:
    found = four.call(RUN("built_before"), kind, trained_before)[0]
    same(found, expected("built_before", None, trained_before))
    assert found["spread"] == 4
    assert found["sent"] > 0
    assert bool(found["sharded"]) == (kind == "2x2")


def test_parallelize_moves_a_trained_model_with_its_slots(four: ProcessWorld, expected: Any) -> None:
    """From no strategy to one: test_zero.py."""
    found = four.call(RUN("parallelized"), ("dp", "mp", "2x2"))[0]
    same(found, expected("parallelized", (None,) * 3))
    moved = {path for path in found["sharded"] if "momentum" in path}
    assert {path for path in moved if "column_kernel" in path}
    # Compiled for where all was whole, a step would bring it there each time.
    assert found["gathers"] == 0


# Running eagerly takes longest by far.
WAYS = [("eagerly", "2x2"), ("custom step", "dp"), ("by batch", "2x2")]


@pytest.mark.parametrize(("how", "kind"), WAYS)
def test_every_way_to_run_the_steps(four: ProcessWorld, expected: Any, how: str, kind: str) -> None:
    found = four.call(RUN("stepped"), kind, how)[0]
    same(found, expected("stepped", None, how))
    assert found["spread"] == 4
    if how == "custom step":
        assert found["rows"] == [2, 6]


@pytest.mark.parametrize("kind", ["DataParallel", "ModelParallel"])
def test_keras_own_strategies(four: ProcessWorld, expected: Any, kind: str) -> None:
    found = four.call(RUN("keras_strategies"), kind)[0]
    same(found, expected("keras_strategies", None))
    assert found["spread"] == 4
    assert found["sent"] > 0
    assert bool(found["sharded"]) == (kind == "ModelParallel")


def test_a_data_source_on_four_devices(four: ProcessWorld, expected: Any) -> None:
    same(four.call(RUN("fed"), "dp", "PyDataset")[0], expected("fed", None, "arrays"))


@pytest.mark.processes
@pytest.mark.parametrize(
    # A DataLoader: test_rows_that_are_read.
    ("source", "kind"),
    [("arrays", "2x2 across"), ("generator", "mp")],
)
def test_every_process_reads_the_same_data(pair: ProcessWorld, expected: Any, source: str, kind: str) -> None:
    for found in pair.call(RUN("fed"), kind, source):
        same(found, expected("fed", None, "arrays"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "kind"),
    [("shuffled arrays", "2x2 across"), ("arrays by batches", "dp"), ("DataLoader that collates", "dp")],
)
def test_every_process_reads_its_rows_of_the_same_order(
    pair: ProcessWorld, expected: Any, source: str, kind: str
) -> None:
    for found in pair.call(RUN("fed"), kind, source):
        same(found, expected("fed", None, source))


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "workers"), [("dp", 0), ("dp", 2), ("mp", 0)])
def test_rows_that_are_read(pair: ProcessWorld, expected: Any, kind: str, workers: int) -> None:
    """Each process reads the rows that its devices hold: of an axis that cuts no batch all of them."""
    first, second = pair.call(RUN("rows_read"), kind, workers)
    for found in (first, second):
        same(found, expected("fed", None, "arrays"))
    every = set(range(26))  # of the model's data
    assert set(first["read"]) | set(second["read"]) == every
    if kind == "dp":
        # Of the last batch's two rows the second process holds none: it reads one, and cuts it off.
        assert set(first["read"]) & set(second["read"]) == {24}
    else:
        assert set(first["read"]) == set(second["read"]) == every


@pytest.mark.processes
@pytest.mark.parametrize("parts", [[(0, 7), (7, 26)], [(0, 16), (16, 18)]])
def test_every_process_is_given_its_own_rows(pair: ProcessWorld, expected: Any, parts: Any) -> None:
    for found in pair.call(RUN("own_parts"), parts):
        same(found, expected("own_parts", tuple(parts)))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("batch", r"process 0 to train step with batch float32 \(8, 4\).*process 1 to .*batch float32 \(6, 4\)"),
        ("all", r"process 0 to train step with batch float32 \(8, 4\).*process 1 to .*batch float32 \(6, 4\)"),
        ("program", r"process 1 to train step with .*tanh"),
    ],
    ids=["batch", "all", "program"],
)
def test_the_steps_of_processes_are_compared(pair: ProcessWorld, how: str, words: str) -> None:
    """Before their first run, or, where they are asked to, before each."""
    told = pair.call(RUN("parted"), how)
    for kind, text, together in told:
        assert kind == "DesyncError", text
        assert re.search(words, text), text
        assert together == told[0][2]


@pytest.mark.processes
def test_a_model_built_differently_in_each_process_becomes_process_0s(pair: ProcessWorld, expected: Any) -> None:
    for found in pair.call(RUN("built_before"), "2x2", False):
        close(found["history"], expected("built_before", None, False)["history"])


def test_layouts_are_found_around_recurrent_layers(four: ProcessWorld) -> None:
    four.call(RUN("recurrent_found"))


def test_low_rank_kernels_that_span_processes_are_saved(pair: ProcessWorld, tmp_path: Path) -> None:
    pair.call(RUN("low_rank_saved"), str(tmp_path))


@pytest.mark.parametrize("owner", ["unidist", "keras"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [("idle", r"match no variable.*nothing"), ("double", "matches several rules"), ("indivisible", "does not divide")],
)
def test_a_layout_map_that_does_not_fit_is_refused(four: ProcessWorld, owner: str, fault: str, words: str) -> None:
    text = four.call(RUN("refused"), f"{owner}: {fault}")[0]
    assert re.search(words, text), text


CHOOSES = "XLA's partitioner chooses how it computes with the shards of "


@pytest.mark.parametrize("kind", ["dp", "mp", "2x2"])
def test_describe_tells_what_the_devices_hold(four: ProcessWorld, kind: str) -> None:
    rows, why = four.call(RUN("described"), kind, 0)[0]
    for told, true, _ in rows:
        assert told == true
    cut = {"column": f"{CHOOSES}'kernel' and 'bias'", "row": f"{CHOOSES}'kernel'"}
    assert why == ({} if kind == "dp" else cut)
    kernel = next(told for told, _, _ in rows if told[0].endswith("column/kernel"))
    assert kernel[3] == {"dp": (12, 32), "mp": (12, 8), "2x2": (12, 16)}[kind]
    assert {layout for _, _, layout in rows} == (
        {"Layout()"} if kind == "dp" else {"Layout()", "Layout(None, 'model')", "Layout('model')"}
    )


def test_describe_tells_which_weights_are_gathered(four: ProcessWorld) -> None:
    _, why = four.call(RUN("described"), "2x2", 3)[0]
    gathered = "gathered for each call: data axes cut "
    assert why == {
        "column": f"{CHOOSES}'kernel' and 'bias'",
        "row": f"{CHOOSES}'kernel'; {gathered}'bias'",
        "head": f"{gathered}'kernel' and 'bias'",
    }


def test_a_file_saved_on_one_mesh_is_loaded_on_another(four: ProcessWorld, one: ProcessWorld, tmp_path: Path) -> None:
    _round_trip(one, None, four, "mp", tmp_path, one)


@pytest.mark.processes
def test_processes_save_one_file_and_load_it(
    pair: ProcessWorld, one: ProcessWorld, four: ProcessWorld, tmp_path: Path
) -> None:
    for k, (writer, kind, reader, other) in enumerate(
        [(pair, "2x2 across", one, None), (four, "2x2", pair, "2x2 across")]
    ):
        folder = tmp_path / str(k)
        folder.mkdir()
        _round_trip(writer, kind, reader, other, folder, one)


def _round_trip(
    writer: ProcessWorld, kind: str | None, reader: ProcessWorld, other: str | None, folder: Path, one: ProcessWorld
) -> None:
    written = writer.call(RUN("saved"), kind, str(folder))
    read = reader.call(RUN("loaded"), other, str(folder))
    alone = one.call(RUN("loaded"), None, str(folder))[0]
    for result in written:
        close(result["get_weights"], written[0]["get_weights"])
    for result in read:
        close(list(result["before"]["weights"].values()), written[0]["get_weights"])  # Keras renames on loading
        close(result["before"]["slots"], written[0]["slots"])
        close(result["by_weights"], written[0]["get_weights"])
        same(result, {key: alone[key] for key in ("history", "weights", "slots")})


@pytest.mark.processes
def test_a_save_by_one_process_alone_is_told_to_all(pair: ProcessWorld, tmp_path: Path) -> None:
    told = pair.call(RUN("saved_by_one"), str(tmp_path))
    for kind, text, loss in told:
        assert kind == "DesyncError", text
        assert "process 0 to saving; process 1 to agreement" in text
        assert loss == told[0][2]
    assert not list(tmp_path.iterdir())


ADDING = "tests.keras.jax.adding:{}".format


def test_losses_that_layers_add_are_counted_once_however_often_a_step_is_traced(
    four: ProcessWorld, one: ProcessWorld
) -> None:
    found = four.call(ADDING("retraced"), "dp", 1)[0]
    same(found, one.call(ADDING("retraced"), None, 0)[0])
    assert found["spread"] == 4


def test_losses_of_a_call_that_was_only_traced_are_forgotten(four: ProcessWorld) -> None:
    """The call within the step adds one for each of five points in time."""
    assert set(four.call(ADDING("tried"), 3)[0]) == {0, 5}


def test_metrics_are_reduced_with_the_gradients(four: ProcessWorld) -> None:
    """One collective a step, with metrics or without; the two counts and the two sums among them are scalars."""
    counts, sizes = four.call("tests.keras.counted:counts_with_metrics")[0]
    assert counts == [3, 3]
    assert 0 < sizes[1] - sizes[0] <= 3 * 4 * Fraction(2 * 3 * 4, 4)


@pytest.mark.parametrize(
    ("kind", "zero", "case"), [("dp", 0, "ranked"), ("2x2", 1, "ranked"), ("dp", 0, "ordered"), ("2x2", 0, "ordered")]
)
def test_what_is_sorted_and_transformed(four: ProcessWorld, one: ProcessWorld, kind: str, zero: int, case: str) -> None:
    """Rows of a batch that does not divide, one less than those of a batch that does, and features."""
    program = "tests.keras.mixing:mixed"
    found = four.call(program, kind, zero, case, True)[0]
    same(found, one.call(program, None, 0, case, True)[0])
    assert found["spread"] == 4


def test_one_place_is_written(four: ProcessWorld, one: ProcessWorld) -> None:
    program = "tests.keras.jax.steps:one_place"
    found, wanted = four.call(program, "dp")[0], one.call(program, None)[0]
    np.testing.assert_array_equal(found["table"], wanted["table"])


@pytest.mark.processes
def test_a_loss_may_need_more_rows_than_a_process_has(pair: ProcessWorld, one: ProcessWorld) -> None:
    """Keras traces it before the first step, with the rows of all."""
    wanted = one.call("tests.keras.alike:mined", None, 0)[0]
    for found in pair.call("tests.keras.alike:mined", "dp", 3):
        same(found, wanted)


def test_tf_data(expected: Any) -> None:
    with ProcessWorld(
        1, launcher=None, env=with_tensorflow(), setup=virtual, setup_args=(4,), timeout=200, preload=PRELOAD
    ) as world:
        same(world.call(RUN("fed"), "dp", "tf.data")[0], expected("fed", None, "arrays"))


def test_the_ledger_tells_the_gradients_of_data_parallel_steps_exactly(four: ProcessWorld) -> None:
    steps = 3
    found = four.call(RUN("traffic"), "dp", steps * 8, 8)[0]
    # XLA merges the gradients with the one scalar of the loss, of 4 bytes; each byte goes out 2 (n-1)/n times.
    assert found["fit"]["all_reduce"] == steps * 2 * 3 * (found["gradients"] + 4) // 4
    assert found["fit"]["count"] == steps
    assert found["fit"]["bytes"] == found["fit"]["all_reduce"]
    assert found["fit"]["purposes"] == ["train step (compiled)"]
    assert found["fit"]["axes"] == [("data",)]
    assert found["again"] == found["fit"]
    assert found["evaluate"]["purposes"] == ["test step (compiled)"]
    assert found["evaluate"]["bytes"] == steps * 2 * 3 * 4 // 4
    assert found["predict"]["count"] == 0


def test_the_ledger_names_the_axes_of_a_2x2_mesh(four: ProcessWorld) -> None:
    found = four.call(RUN("traffic"), "2x2", 16, 8)[0]
    assert {("data",), ("model",)} <= set(found["fit"]["axes"])


@pytest.mark.processes
def test_the_ledger_in_two_processes(pair: ProcessWorld) -> None:
    for found in pair.call(RUN("traffic"), "dp", 16, 8):
        assert found["fit"]["all_reduce"] >= 2 * 2 * 3 * found["gradients"] // 4
        # Every process gets the whole prediction: 8 rows of 4 floats.
        assert found["predict"]["bytes"] == 2 * 3 * (8 * 4 * 4) // 4

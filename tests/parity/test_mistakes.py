"""What users do wrong is reported by a typed error that says what was asked, what was found and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parity.worlds import SETTINGS, Setting, Worlds

pytestmark = pytest.mark.processes

LAYOUTS = {
    "rule_that_matches_nothing": r"rules that match no variable: \['wide.*kernell'\].*whole path.*'net/wide/kernel'",
    "rule_that_matches_part_of_a_path": r"rules that match no variable: \['wide'\].*re.fullmatch",
    "two_rules_for_one_variable": r"'net/wide/kernel' matches several rules: .*make each path match one",
    "unknown_axis": r"axis 'modle', but the mesh has \{'data': 2, 'model': 2\}",
    "one_axis_on_two_dims": r"'model'.*(twice|two)",
    "dim_that_does_not_divide": r"'net/wide/kernel' of shape \(4, 6\): dim 1 \(6\) does not divide over model \(4\): ",
    "more_dims_than_the_variable": r"'net/wide/bias' of shape \(8,\)",
}


@pytest.mark.parametrize("setting", ["sim-torch", "jax-4", "torch-4"])
@pytest.mark.parametrize(("mistake", "text"), LAYOUTS.items(), ids=list(LAYOUTS))
def test_a_wrong_layout_is_refused_before_the_first_step(setting: str, mistake: str, text: str, worlds: Worlds) -> None:
    for kind, message in worlds.get(setting).call(f"tests.parity.mistakes:{mistake}"):
        assert kind == "LayoutError", message
        assert re.search(text, message, re.DOTALL), message


@pytest.mark.parametrize("setting", ["sim-torch", "jax-4", "torch-4"])
def test_a_mesh_larger_than_the_world(setting: str, worlds: Worlds) -> None:
    for kind, message in worlds.get(setting).call("tests.parity.mistakes:mesh_larger_than_the_world"):
        assert kind == "MeshError", message
        assert re.search(r"64", message), message
        assert re.search(r"4 devices|devices=|4 processes|unidist run", message), message


@pytest.mark.parametrize("setting", ["sim-torch", "jax-4", "torch-4", "tensorflow-4"])
def test_a_mesh_that_leaves_devices_out(setting: str, worlds: Worlds) -> None:
    for kind, message in worlds.get(setting).call("tests.parity.mistakes:mesh_smaller_than_the_world"):
        assert kind == "MeshError", message
        assert message.startswith("Mesh({'data': 3}) has 3 of the 4 devices"), message
        assert re.search(r"unidist run -n 3|use\('\w+', devices=3\)", message), message


@pytest.mark.parametrize("setting", ["sim-torch", "jax-4", "torch-4"])
def test_a_model_outside_of_the_scope_is_warned_of_once(setting: str, worlds: Worlds) -> None:
    world = worlds.get(setting)
    first, *others = world.call("tests.parity.mistakes:model_outside_of_the_scope")
    [(message, is_here)], sent = first
    where = "on one device" if not others else f"in each of {len(others) + 1} processes by itself"
    there = "There is a DataParallel over Mesh({'data': 4})"
    assert message.startswith(
        f"model 'net' has no strategy: it trains {where}. {there}. Make the model inside of `with"
    )
    assert (is_here, sent) == (True, 0.0)
    assert others == [([], 0.0)] * len(others)


@pytest.mark.parametrize("setting", ["sim-torch", "jax-4", "torch-4"])
def test_found_layouts_that_cut_nothing_are_warned_of_once(setting: str, worlds: Worlds) -> None:
    [(message, is_here)], *others = worlds.get(setting).call("tests.parity.mistakes:layouts_that_cut_nothing")
    assert message.startswith("model 'of_3' under ModelParallel: nothing is cut over model=4: each of these devices")
    assert re.search(r"\(of '\S*wide/kernel', the largest: .*no dim of \(5, 3\) divides by 4", message), message
    assert is_here
    assert others == [[]] * len(others)


@pytest.mark.parametrize("setting", ["sim-torch", "jax-4", "tensorflow-4"])
def test_clear_session_leaves_the_strategy_of_a_scope(setting: str, worlds: Worlds) -> None:
    for first, second in worlds.get(setting).call("tests.parity.mistakes:clear_session_in_a_scope"):
        assert first == second > 0


@pytest.mark.parametrize("setting", ["sim-torch", "torch-2"])
def test_an_operation_that_gathers_much_is_warned_of_once(setting: str, worlds: Worlds) -> None:
    for said in worlds.get(setting).call("tests.parity.mistakes:gathering"):
        (message,) = said
        assert re.match(r"model 'net': no rule cuts the operation 'sort', .* gathered: \d+\.\d% of the bytes", message)


@pytest.mark.parametrize("setting", ["jax-4", "tensorflow-4"])
def test_sequence_parallelism_without_torch(setting: str, worlds: Worlds) -> None:
    for kind, message in worlds.get(setting).call("tests.parity.mistakes:parts_of_sequences"):
        assert kind == "CapabilityError", message
        assert re.search(r"sequence_parallel=True: .*KERAS_BACKEND=torch", message), message


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("sim-torch", r"unidist.use\('sim', devices=8\) before the model is made, which gives 8 devices"),
        ("jax-4", r"unidist.use\('jax', devices=8\) before the model is made, which gives 8 virtual CPU devices"),
        ("tensorflow-4", r"unidist.use\('tensorflow', devices=8\) before the model is made"),
        ("torch-4", r"unidist run --backend torch -n 8 script.py"),
    ],
)
def test_one_line_for_more_devices_than_there_are(setting: str, text: str, worlds: Worlds) -> None:
    for kind, message in worlds.get(setting).call("tests.parity.mistakes:more_devices_than_there_are"):
        assert kind == "MeshError"
        assert re.search(rf"world_size=8, but there are 4 devices: .*: .*{text}", message), message


def test_an_optimizer_of_torchs_that_was_made_before_the_layouts_were_found(worlds: Worlds) -> None:
    for kind, message in worlds.get("torch-2").call(
        "tests.parity.mistakes:optimizer_of_torch_before_layouts_are_found"
    ):
        assert kind == "CapabilityError"
        assert "a tensor that it no longer uses. Make it afterwards, from model.parameters(): behind" in message


def test_a_gradient_that_is_the_next_value(worlds: Worlds) -> None:
    for kind, message in worlds.get("horovod-2-tensorflow").call("tests.parity.mistakes:float8_training"):
        assert kind == "CapabilityError"
        assert "layer 'narrow' has the variable" in message
        assert "as those of float8 quantization are" in message


@pytest.mark.parametrize(
    ("way", "text"),
    [
        (
            "loop",
            r"variable 'sequential\w*/narrow/inputs_scale' has overwrite_with_gradient=True.*Train the model with fit",
        ),
        ("later", "a loop of your own averages gradients"),
        ("grad", "a loop of your own averages gradients"),
        ("parts", "layer 'narrow' has the variable .*Leave sequence_parallel out"),
    ],
)
def test_a_gradient_that_is_the_next_value_on_torch(way: str, text: str, worlds: Worlds) -> None:
    for kind, message in worlds.get("torch-2").call("tests.parity.mistakes:float8_elsewhere", way):
        assert kind == "CapabilityError", message
        assert re.search(text, message), message


def test_a_state_of_whole_batches_in_data_parallel(worlds: Worlds) -> None:
    """Over Horovod: test_tensorflow_horovod.py. Where states are global, it trains."""
    kind, message = worlds.get("sim-torch").call("tests.parity.mistakes:stateful_layer")[0]
    assert kind == "CapabilityError"
    assert "layer 'memory' has stateful=True" in message
    assert "each of the 6 rows of the batches that it was built for, but each of 4 devices gets at most 2," in message
    for setting in ("jax-4", "tensorflow-4"):
        assert worlds.get(setting).call("tests.parity.mistakes:stateful_layer")[0] == ("nothing", "")


def test_a_mesh_that_leaves_a_process_out_on_tensorflow(worlds: Worlds) -> None:
    """There TensorFlow itself would crash. All processes get the same error, so that none waits."""
    world = worlds.get("tensorflow-2x2")
    for kind, message in world.call("tests.parity.mistakes:mesh_without_a_process"):
        assert (kind, "has 2 of the 4 devices" in message) == ("MeshError", True), message
    first, second = world.call("tests.parity.mistakes:array_without_a_process")
    assert first[0] == "nothing"
    assert (second[0], "this process holds no rank" in second[1]) == ("MeshError", True), second


def test_torch_without_a_launcher_says_how_to_start() -> None:
    with Setting("torch-1", "torch", "torch").world() as world:
        kind, message = world.call("tests.parity.mistakes:mesh_larger_than_the_world")[0]
    assert kind == "MeshError", message
    assert re.search(r"unidist run -n 64|torchrun", message), message


@pytest.mark.parametrize(("keras", "name"), [("jax", "torch"), ("torch", "jax")])
def test_a_backend_that_keras_does_not_run_on(keras: str, name: str) -> None:
    with Setting("other", keras).world() as world:
        kind, message = world.call("tests.parity.mistakes:another_backend", name)[0]
    assert kind == "BackendMismatchError", message
    assert f"use({name!r}) needs Keras on {name}" in message
    assert f"KERAS_BACKEND={name}" in message


@pytest.mark.parametrize("setting", ["torch-2", "jax-2x2"])
def test_initialize_twice_or_against_the_launcher(setting: str) -> None:
    with SETTINGS[setting].world() as world:
        for kind, message in world.call("tests.parity.mistakes:initialize_against_the_launcher"):
            assert kind == "BackendMismatchError", message
            assert re.search(r"7.*of 2", message), message
        for kind, message in world.call("tests.parity.mistakes:second_initialize"):
            assert kind == "BackendMismatchError", message
            assert "a second time" in message
            assert "unidist.shutdown()" in message


@pytest.mark.parametrize("setting", ["sim-torch", "jax-4"])
def test_a_model_that_is_not_built(setting: str, worlds: Worlds) -> None:
    kind, message = worlds.get(setting).call("tests.parity.mistakes:not_built")[0]
    assert (kind, "not built" in message) == ("LayoutError", True), message


def test_a_model_that_is_distributed_already(worlds: Worlds) -> None:
    """On torch a placed model keeps its strategy. On JAX it is laid out anew."""
    kind, message = worlds.get("sim-torch").call("tests.parity.mistakes:distributed_in_two_ways")[0]
    assert (kind, "already" in message) == ("LayoutError", True), message


_LOST = [
    ("torch-4", 0),
    ("torch-4", 1),
    ("horovod-2", 0),
    ("horovod-2", 1),
    ("horovod-2-tensorflow", 0),
    ("tensorflow-2x2", 0),
    ("tensorflow-2x2", 1),
]


@pytest.mark.parametrize(("setting", "lost"), _LOST)
def test_a_killed_process_ends_the_others_with_an_error_in_time(setting: str, lost: int, tmp_path: Path) -> None:
    _told_in_time("lose_a_process", setting, lost, tmp_path)


@pytest.mark.parametrize(("setting", "lost"), [("torch-2", 0), ("torch-4", 1), ("horovod-2", 1)])
def test_so_does_one_that_is_killed_amid_rows_for_experts(setting: str, lost: int, tmp_path: Path) -> None:
    _told_in_time("lose_a_process_amid_rows", setting, lost, tmp_path)


def _told_in_time(run: str, setting: str, lost: int, tmp_path: Path) -> None:
    count = SETTINGS[setting].processes
    with SETTINGS[setting].world() as world:
        outcomes = world.outcomes(f"tests.parity.mistakes:{run}", lost, str(tmp_path))
    assert {outcome.failure.kind for outcome in outcomes.values() if outcome.failure is not None} == {"ended"}
    assert len(outcomes) == count
    told = {path.name: path.read_text().split("\n", 1) for path in tmp_path.glob("told-*")}
    assert sorted(told) == [f"told-{index}" for index in range(count) if index != lost]
    for seconds, message in told.values():
        assert float(seconds) < 30
        assert "another process of the group ended" in message


def test_a_process_on_tensorflow_that_goes_another_way_or_does_not_come_is_told(tmp_path: Path) -> None:
    """DTensor by itself waits for ever for one that is alive, or crashes."""
    with SETTINGS["tensorflow-2x2"].world() as world:
        for kind, message in world.call("tests.parity.mistakes:apart_at_the_gate"):
            assert kind == "DesyncError"
            assert "process 0 to what process 0 does; process 1 to what process 1 does" in message
        # A hang shall not take the time of the world's start.
        world.timeout = 60.0
        for kind, message in world.call("tests.parity.mistakes:stall", "elsewhere", tmp_path):
            assert kind == "DesyncError"
            assert re.search(r"process 0 to a train step on .*\[4, 4\].*; process 1 to reading a value", message), (
                message
            )
        for kind, message in world.call("tests.parity.mistakes:stall", "another batch", tmp_path):
            assert kind == "DesyncError"
            assert "fit: the argument batch_size is " in message
        first, second = world.call("tests.parity.mistakes:stall", "late", tmp_path)
    assert first[0] == second[0] == "ProcessLostError"
    assert re.search(r"a train step on .*\(processes \[1\] were not there after 1 s", first[1]), first
    assert "process 0 waited for the others in vain" in second[1], second

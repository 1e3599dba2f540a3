"""jit_compile=True on torch: a whole step is one program, which computes and sends what the step does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests import preloaded
from tests.keras.torch import whole
from unidist.testing.processes import ProcessFailedError, ProcessWorld

# Compilers take long on a busy machine.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def _world(processes: int, setup: Callable[[], None] = whole.start_without_compiling) -> ProcessWorld:
    """What is traced is the same where torch.compile has not compiled it."""
    return ProcessWorld(
        processes, env={"KERAS_BACKEND": "torch"}, setup=setup, timeout=500, preload=preloaded.KERAS["torch"]
    )


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    with _world(2) as found:
        yield found


# float32 in bfloat16's 8 bits; a norm's gradient is rounding where the next layer takes a shift away.
WIDER = {"lowered": 1e-2, "normed": 1e-4, "images": 1e-4}


# Rules of a model axis; parts that are updated and joined; shards that are gathered before they are read, and again in
# backward; gradients that wait for those of later steps.
CUT = {
    "model": ["attending"],
    "zero1": ["every second", "accumulated"],
    "zero3": ["lowered", "in float8", "two losses"],
    "zero1 on the host": ["averaged"],
    "zero3 on the host": ["own step"],
}
# Those that are in no test below, where values are cut as well.
OF_CUT = ("own step", "attending", "in float8", "lowered", "normed", "two losses")
WHOLE_VALUES = [name for name in whole.CASES if name not in OF_CUT]


def _check(name: str, world: ProcessWorld, kind: str) -> None:
    for found in world.call(whole.compared, name, kind):
        assert found["why"] == {}
        shapes = 2 if name in whole.RAGGED else 1
        steps = 2 * shapes if name == "accumulated" else shapes
        assert found["told"] == f"a program for each shape of a batch: {steps} by now"
        assert found["apart"] <= WIDER.get(name, 1e-5), found["apart"]
        sent, wanted = found["sent"]
        # In a step that is skipped a program sends what its other branch does.
        more = {"parameters"} if kind.startswith("zero1") and name in ("scaled", "every second") else set()
        assert not wanted - sent, wanted - sent
        assert {purpose for _, _, purpose, _ in sent - wanted} == more, sent - wanted
        assert sum(sent.values()) > 0
        # Full batches, and ragged ones: to train, and to evaluate and to predict.
        count = 3 * shapes if name in whole.EVALUATED else steps
        assert found["programs"] == (count, count if name != "accumulated" else 3)  # ragged ones are too few


@pytest.mark.parametrize("name", WHOLE_VALUES)
def test_a_step_is_what_it_is_without_a_program(name: str, world: ProcessWorld) -> None:
    _check(name, world, "data")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CUT.items() for name in names])
def test_where_values_or_activations_are_cut(kind: str, name: str, world: ProcessWorld) -> None:
    _check(name, world, kind)


def test_on_a_mesh_of_two_axes_with_parts_of_sequences_and_stored_shards() -> None:
    with _world(4) as world:
        _check("attending", world, "2x2 sequence zero3")


def test_of_three_processes_one_has_no_row_of_the_last_batch() -> None:
    with _world(3) as world:
        # What has no row there, and nothing of which is stored whole.
        _check("normed", world, "zero3")
        for found in world.call(whole.compared, "rounding", "data"):
            assert found["why"] == {}


@pytest.mark.parametrize("name", whole.AS_THEY_ARE)
def test_what_reads_values_runs_as_it_is_and_says_why(name: str, world: ProcessWorld) -> None:
    for found, said in world.call(whole.told, name):
        assert found["apart"] <= 1e-6
        assert said
        assert re.match(r"jit_compile=True: a train step of model 'sequential\w*' runs as it is: ", said[0])
        assert whole.AS_THEY_ARE[name][1] in said[0]
        assert found["told"] == f"runs as it is, though jit_compile=True: {found['why']['train']}"


def test_callbacks_that_change_a_model_are_seen(world: ProcessWorld) -> None:
    for apart, counts in world.call(whole.steered):
        assert apart <= 1e-5
        assert counts == (2, 1)


def test_what_is_compiled_again_is_another_program(world: ProcessWorld) -> None:
    assert max(world.call(whole.compiled_again)) <= 1e-5


def test_programs_are_compared_again_where_all_is_checked(world: ProcessWorld) -> None:
    """A number that changes behind the proof is the trace's, as under JAX's jit; who checks all is told."""
    assert world.call(whole.checked, "first") == [{}] * 2
    for why in world.call(whole.checked, "all"):
        assert why["train"].startswith("run again, it gives other numbers for ")


def test_updated_parts_are_joined_while_the_next_step_begins(world: ProcessWorld) -> None:
    """And all is exchanged in parts.

    Over gloo a reduce_scatter would send all of each gradient, and gathers that are under way together would mix.
    """
    for counts, collectives, kept in world.call(whole.going_on):
        assert counts[-1] > 0
        assert collectives == {"all_to_all_single", "all_reduce", "wait_tensor"}
        assert kept


def test_two_programs_of_a_fit_with_a_ragged_batch_and_a_schedule(world: ProcessWorld) -> None:
    assert world.call(whole.scheduled) == [(2, 2)] * 2


def test_processes_with_batches_of_their_own_agree_when_one_has_a_new_shape(world: ProcessWorld) -> None:
    """One process has a single shape, and three are new to the other, each in another step."""
    found = world.call(whole.of_own_lengths)
    for apart, why, _, _ in found:
        assert why == {}
        assert apart <= 1e-5
    assert [traced for _, _, traced, _ in found] == [1, 3]
    assert [compiled for _, _, _, compiled in found] == [1, 3]


def test_a_trace_leaves_no_loss_behind(world: ProcessWorld) -> None:
    assert world.call(whole.left_behind) == [[0]] * 2


def test_every_optimizer(world: ProcessWorld) -> None:
    for found in world.call(whole.of_every_optimizer):
        assert {name: apart for name, apart in found.items() if apart > 1e-5} == {}
        assert len(found) == len(whole.OPTIMIZERS)


def test_a_process_that_ends_amid_programs_is_told() -> None:
    with _world(2) as world:
        outcomes = world.outcomes(whole.lost)
    assert outcomes[0].failure is None, outcomes[0].failure
    text, seconds = outcomes[0].value
    assert text.startswith("program")
    assert "over ranks [0, 1]" in text
    assert seconds < 60
    assert isinstance(outcomes[1].failure, ProcessFailedError)
    assert outcomes[1].failure.kind == "ended"


def test_compiled_it_is_the_same_and_without_a_compiler_too() -> None:
    with _world(2, whole.start) as world:
        for apart, count in world.call(whole.compiled):
            assert apart <= 1e-5
            assert count == 1
        for (apart, count), said, called in world.call(whole.without_a_compiler):
            assert apart <= 1e-5
            assert count == 0
            assert len(said) == 1
            assert "torch.compile has failed, so programs of model 'sequential" in said[0]
            assert "' run as they were traced: " in said[0]
            # Sums begin amid backward: a product comes behind the first, before the first is waited for.
            first = called.index("all_to_all_single")
            waited = called.index("wait_tensor", first)
            assert "mm" in called[first:waited]
            # Nobody waits for the joins.
            assert called[first:].count("all_to_all_single") > called[first:].count("wait_tensor")

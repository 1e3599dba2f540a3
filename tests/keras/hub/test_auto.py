"""keras_hub's backbones with nothing but ModelParallel(mesh): equal to one device, and cut as the plan says."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest

import unidist
from tests import preloaded
from tests.keras.hub import table, tasks, zoo
from tests.support import sampling
from tests.support.sampling import unless_all
from tests.visible import OF_KERAS
from unidist.testing.processes import ProcessWorld

# At least 95 % of it must be in sharded variables.
GROUPED = zoo.GROUPED
MOST = ("bert", "roberta", "gpt2", "opt", *GROUPED)
FOUR = ("bert", "gpt2", *GROUPED, "t5", "bloom", "falcon", "gpt-oss", "deberta-v3")
STEPS = unless_all(zoo.STEPS, table.STEPS)

# Four ranks cut what two cut, and further.
RANKS = [(name, ranks) for ranks in (2, 4) for name in zoo.BACKBONES if ranks == 2 or name in FOUR]
# T5 takes as long as four others.
SOME = [(name, 4 if name in FOUR and name != "t5" else 2) for name in zoo.BACKBONES]


@pytest.mark.parametrize(("name", "ranks"), unless_all(SOME, RANKS))
def test_a_backbone_without_a_rule_trains_as_on_one_device(name: str, ranks: int) -> None:
    mesh = zoo.mesh({"model": ranks})
    found, traffic = zoo.planned(name, ranks, STEPS)
    zoo.assert_equal(found, zoo.alone(name, STEPS))
    plan = unidist.plan(found.model, mesh)
    # Every pair that the plan found on random numbers was proven on the first batch, and no other.
    proven = zoo.rows_of(found.model)
    paired = {pair[-1] for pair in plan.pairs}
    if (name, ranks) == ("gemma3", 4):  # it splits four query heads into two groups of two: no dim has four parts
        paired = {row for row in paired if "attention" not in row}
    assert proven == paired
    assert plan.pairs
    assert any(e.op == "all_reduce" and e.purpose in proven for e in traffic.events)
    held = {row.path: row.layout for row in unidist.describe(found.model).rows if row.kind == "weights"}
    assert held == {row.path: row.layout for row in plan.rows}
    if name in MOST:
        assert plan.sharded_fraction >= 0.95


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("bert", 2), ("gpt2", 4), ("t5", 2), ("bart", 2), *((name, 4) for name in unless_all(GROUPED[:1], GROUPED[:-1]))],
)
def test_a_step_sends_what_closed_forms_predict(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for compilers; test_planned.py has those that are rehearsed."""
    monkeypatch.setattr("unidist.keras.torch.driver.rehearse", lambda *step: "a compiler chooses")
    mesh = zoo.mesh({"model": ranks})
    found, traffic = zoo.planned(name, ranks, STEPS)
    plan = unidist.plan(found.model, mesh, batch=zoo.ROWS, sequence=zoo.LENGTH)

    def of_layers(ledger: unidist.Ledger) -> list[tuple[str, float]]:
        named = {row.path.rpartition("/")[0] for row in plan.rows}
        names = named | {row.path for row in plan.rows}
        return sorted((e.op, float(e.bytes)) for e in ledger.events if e.purpose in names)

    predicted = of_layers(plan.predicted)
    assert len(predicted) >= 9
    assert of_layers(traffic) == sorted(predicted * STEPS)


@pytest.mark.parametrize(("name", "policy"), [("bert", "bfloat16"), ("llama mqa", "mixed_float16")])
def test_rows_of_low_precision_take_cut_features(name: str, policy: str) -> None:
    """Rounding of a few thousandths hides no mistake, and makes none of a pair."""
    keras.config.set_dtype_policy(policy)
    try:
        found = zoo.train(zoo.BACKBONES[name], unidist.ModelParallel(unidist.Mesh({"model": 4})), steps=1)
        assert found.model.compute_dtype == policy.removeprefix("mixed_")
        wanted = zoo.train(zoo.BACKBONES[name], steps=1)
    finally:
        keras.config.set_dtype_policy("float32")
    assert len(zoo.rows_of(found.model)) == 4
    # One step from the same weights: only rounding parts them.
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-2)


def test_data_and_model_axes_and_zero() -> None:
    zero = 3
    strategy = unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2}), zero=zero)
    found = zoo.train(zoo.BACKBONES["bert"], strategy, steps=STEPS)
    zoo.assert_equal(found, zoo.alone("bert", STEPS))
    assert len(zoo.rows_of(found.model)) == 4
    plan = unidist.plan(found.model, strategy.strategy.mesh, zero=zero)
    rows, count = unidist.describe(found.model).rows, len(found.model.variables)
    assert plan.bytes_per_device == sum(row.bytes_per_device for row in rows[:count])
    # The optimizer counts its steps and its rate beside.
    assert plan.slot_bytes_per_device == sum(row.bytes_per_device for row in rows[count:] if row.shape)


@pytest.mark.parametrize("name", unless_all(["llama mqa"], ["bert", "llama mqa", "gpt-neox"]))
def test_the_page_of_models_says_what_is_measured(name: str) -> None:
    assert table.row(name) in table.PAGE.read_text().splitlines()
    assert set(zoo.BACKBONES) == {line.split("|")[1].strip() for line in table.rows_of_page()}


@pytest.mark.parametrize(("name", "shape"), [("llama gqa", (2, 2)), ("gemma", (1, 2))], ids=["llama gqa", "gemma"])
def test_the_maps_that_keras_hub_ships_are_taken(name: str, shape: tuple[int, int]) -> None:
    unidist.use("sim", devices=shape[0] * shape[1])
    mesh = keras.distribution.DeviceMesh(shape, ["batch", "model"], unidist.list_devices()[: shape[0] * shape[1]])
    rules = type(zoo.BACKBONES[name]()).get_layout_map(mesh)
    with warnings.catch_warnings():
        # Some of their rules match nothing in a model without logits.
        warnings.filterwarnings("ignore", "layout rules that match no variable")
        found = zoo.train(zoo.BACKBONES[name], unidist.ModelParallel(layout_map=rules), steps=STEPS)
    zoo.assert_equal(found, zoo.alone(name, STEPS))
    assert unidist.describe(found.model).sharded


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_layouts_are_found_in_two_processes(backend: str) -> None:
    with ProcessWorld(
        2,
        env=OF_KERAS["torch"],
        setup=tasks.start,
        setup_args=(backend, None),
        timeout=200,
        preload=preloaded.KERAS["torch"],
    ) as world:
        world.call(tasks.check_one_line, backend)
        # The engine is one for both; tests/parity compares the two in many models.
        for check in (tasks.check_found_layouts, tasks.check_sequence_parallel):
            if backend == "torch" or sampling.WHOLE:
                world.call(check)

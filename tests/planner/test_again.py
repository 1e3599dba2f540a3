"""What a plan says that a step holds whose blocks are computed again, beside what autograd keeps in one."""

from __future__ import annotations

from pathlib import Path

import pytest

import unidist
from unidist import cli
from unidist.testing.processes import ProcessWorld


@pytest.mark.parametrize("remat", ["block", "attention"])
@pytest.mark.parametrize("kind", ["one", "data", "model"])
def test_a_step_holds_as_much(kind: str, remat: str) -> None:
    from tests.planner.again import held_in_a_step

    planned, held, without, sent, planned_to_send = held_in_a_step(kind, remat)
    assert planned == pytest.approx(held, rel=0.02)
    # Of eight blocks one is held, and the inputs of all.
    assert planned < without * (0.3 if remat == "block" else 0.9)
    # Sums inside of a block are made again.
    assert sent == planned_to_send


def test_layers_that_keras_was_asked_to_compute_again_are_planned_so() -> None:
    import keras

    from tests.planner.again import net

    mesh = unidist.Mesh({"data": 1}, devices=[0])
    with keras.RematScope("list_of_layers", layer_names=[f"block_{k}" for k in range(99)] + ["block"]):
        marked = net()
    wanted = unidist.plan(net(), mesh, batch=4, remat="block").activation_bytes_per_device
    before = [layer._remat_mode for layer in marked.layers]
    assert any(before)
    assert unidist.plan(marked, mesh, batch=4).activation_bytes_per_device == wanted
    assert [layer._remat_mode for layer in marked.layers] == before


def on_jax() -> tuple[int, int]:
    from tests.planner.again import net

    mesh, model = unidist.Mesh({"data": 1}, devices=[0]), net()
    found = [unidist.plan(model, mesh, batch=4, remat=how).activation_bytes_per_device for how in ("block", "none")]
    return found[0], found[1]


@pytest.mark.processes
def test_plans_on_jax_know_it(one: ProcessWorld) -> None:
    again, every = one.call(on_jax)[0]
    assert again < 0.3 * every


def test_the_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("from tests.planner.again import net\n")
    told = []
    for how in ("none", "block"):
        assert cli.main(["plan", f"{tmp_path}/model.py:net", "--mesh", "data=2", "--remat", how]) == 0
        line = next(x for x in capsys.readouterr().out.splitlines() if "activations (estimate)" in x)
        told.append(int(line.split()[-1].replace(",", "")))
    assert told[1] < 0.3 * told[0]


def test_a_model_without_such_layers_is_refused() -> None:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    with pytest.raises(unidist.CapabilityError, match="has no such layers"):
        unidist.plan(model, unidist.Mesh({"data": 1}, devices=[0]), remat="block")

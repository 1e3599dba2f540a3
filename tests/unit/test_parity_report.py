"""What a comparison of several backends comes to: all of them must agree with one device."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unidist.backends import registry
from unidist.parity import command
from unidist.parity.command import Outcome, report
from unidist.parity.spec import ParityError, Spec, parse_backends


def outcome(
    backend: str | None, by: float = 0.0, failure: str = "", *, keras: str = "torch", loss: float = 0.5
) -> Outcome:
    """A run of three steps whose last weight is off by so much after the second, and by twice as much at the end."""
    spec = Spec(
        target="train.py:f",
        backend=backend,
        keras=keras,
        mesh={"data": 2} if backend else {},
        steps=3,
        initial=None,
        folder="",
    )
    if failure:
        return Outcome(spec, failure=failure)
    weights = tuple((np.zeros((2, 2)), np.full(3, by * step)) for step in range(3))
    return Outcome(spec, (1.0, loss, 0.2), ("net/kernel", "net/bias"), weights)


def compared(
    outcomes: Sequence[Outcome], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """(exit code, what is printed) where the runs come to these outcomes."""

    def compare(*_: Any) -> list[Outcome]:
        return list(outcomes)

    monkeypatch.setattr(command, "_compare", compare)
    monkeypatch.setattr(registry, "find", lambda name: None)
    (folder / "train.py").touch()
    code = command.main([f"{folder}/train.py:f", "--backends", "sim,torch,jax"])
    return code, capsys.readouterr().out


BACKENDS = ("sim", "torch", "horovod")


@pytest.mark.parametrize("bad", BACKENDS)
@pytest.mark.parametrize("how", [{"by": 2e-5}, {"failure": "exit code 1"}], ids=("differs", "fails"))
def test_one_backend_that_is_not_right_is_enough(
    bad: str,
    how: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes = [outcome(None), *(outcome(name, **(how if name == bad else {})) for name in BACKENDS)]
    code, text = compared(outcomes, tmp_path, monkeypatch, capsys)
    assert code == 1
    assert text.rstrip().endswith("NOT the numbers of one device")
    assert ("net/bias at step 2: 2.0e-05" in text) == ("by" in how)
    assert (f"{bad} failed: exit code 1" in text) == ("failure" in how)


def test_backends_that_are_all_within_the_tolerance_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [outcome(None), *(outcome(name, 0.4e-5) for name in BACKENDS)]
    code, text = compared(outcomes, tmp_path, monkeypatch, capsys)
    assert code == 0, text
    assert text.rstrip().endswith("all agree with one device")


def test_each_run_is_compared_with_one_device_on_its_own_keras_backend() -> None:
    alone = [outcome(None), outcome(None, 0.4e-5, keras="jax")]
    text, good = report([*alone, outcome("jax", 0.8e-5, keras="jax")], 1e-5)
    assert good, text
    text, good = report([*alone, outcome("torch", 0.8e-5)], 1e-5)
    assert not good
    assert "net/bias at step 3: 1.6e-05" in text


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"by": math.nan}, "net/bias at step 1: inf"),
        ({"loss": math.nan}, "the loss: inf, with equal weights"),
        ({"loss": 0.6}, "the loss: 1.0e-01, with equal weights"),
    ],
    ids=str,
)
def test_what_is_no_number_or_differs_in_the_loss_alone_is_told(changes: dict[str, float], where: str) -> None:
    text, good = report([outcome(None), outcome("sim", **changes)], 1e-5)  # type: ignore[arg-type]
    assert not good
    assert where in text
    assert report([outcome(None, **changes), outcome("sim", **changes)], 1e-5)[1]  # type: ignore[arg-type]


def test_all_runs_begin_with_the_first_ones_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Spec] = []

    def run(spec: Spec, timeout: float) -> Outcome:
        seen.append(spec)
        return Outcome(spec)

    monkeypatch.setattr(command, "_run", run)
    options = argparse.Namespace(target="train.py:f", steps=3, timeout=9.0)
    command._compare(options, [("sim", "torch"), ("jax", "jax")], {"data": 2}, tmp_path)
    assert [(spec.backend, spec.keras) for spec in seen] == [
        (None, "torch"),
        (None, "jax"),
        ("sim", "torch"),
        ("jax", "jax"),
    ]
    assert [spec.mesh for spec in seen] == [{}, {}, {"data": 2}, {"data": 2}]
    first = Path(seen[0].folder)
    assert [spec.initial for spec in seen] == [None, *[str(first / command.INITIAL)] * 3]  # type: ignore[attr-defined]
    assert len({spec.folder for spec in seen}) == 4


@pytest.mark.parametrize(("backend", "launched"), [(None, False), ("sim", False), ("torch", True)])
def test_a_run_is_a_process_without_the_shells_backend_and_with_a_limit(
    backend: str | None, launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def start(command_: list[str], **how: Any) -> SimpleNamespace:
        seen.update(how, command=command_)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(command.subprocess, "run", start)  # type: ignore[attr-defined]
    for name, value in {"UNIDIST_BACKEND": "jax", "KERAS_BACKEND": "jax", "RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    spec = Spec(
        target="train.py:f",
        backend=backend,
        keras="torch",
        mesh={"data": 2, "model": 3} if backend else {},
        steps=3,
        initial=None,
        folder=str(tmp_path),
    )
    assert command._run(spec, 9.0).failure == "exit code 3"
    assert seen["timeout"] == 9.0
    assert (seen["env"].get("UNIDIST_BACKEND"), seen["env"]["KERAS_BACKEND"]) == (backend, "torch")
    assert "RANK" not in seen["env"]
    assert (seen["command"][-5:-3] == ["-n", "6"]) == launched


def test_an_adapter_that_says_nothing_of_keras_is_asked_with_the_keras_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", {**registry._entries, "mine": registry.Entry(target="mine:Mine")})
    assert parse_backends("sim,mine:jax") == [("sim", "torch"), ("mine", "jax")]
    with pytest.raises(ParityError, match="say on which Keras backend it runs, as mine:torch"):
        parse_backends("mine")

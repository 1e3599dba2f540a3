"""What a comparison of several backends comes to: all of them must agree with one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidist.backends import registry
from unidist.parity import command
from unidist.parity.report import Outcome
from unidist.parity.spec import Spec


def outcome(backend: str | None, by: float = 0.0, failure: str = "") -> Outcome:
    """A run of two steps whose last weight is off by so much."""
    spec = Spec(
        target="train.py:f",
        backend=backend,
        keras="torch",
        mesh={"data": 2} if backend else {},
        steps=2,
        initial=None,
        folder="",
    )
    if failure:
        return Outcome(spec, failure=failure)
    weights = tuple((np.zeros((2, 2)), np.full(3, by * step)) for step in range(2))
    return Outcome(spec, (1.0, 0.5), ("net/kernel", "net/bias"), weights)


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
    outcomes = [outcome(None), *(outcome(name, 0.9e-5) for name in BACKENDS)]
    code, text = compared(outcomes, tmp_path, monkeypatch, capsys)
    assert code == 0
    assert text.rstrip().endswith("all agree with one device")

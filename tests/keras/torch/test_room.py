"""Process 0 says so where it has no memory for the whole values that Keras's own savers gather."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest

import unidist
from unidist.keras import saving


@pytest.mark.parametrize(("available", "raises"), [(143, True), (144, False)])
def test_a_model_that_does_not_fit_is_refused(available: int, raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    if not raises:
        saving.check_room(model)
        return
    with pytest.raises(unidist.CapabilityError, match=r"unidist\.save\(model, directory\) writes it from all"):
        saving.check_room(model)


@pytest.mark.parametrize("call", [lambda m, d: unidist.save(m, d), lambda m, d: unidist.restore(m, d)])
def test_an_address_that_nobody_knows_makes_no_folder(
    call: Callable[[Any, str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    with pytest.raises(unidist.CheckpointError, match="nosuch://bucket/checkpoints: ValueError: Protocol not known"):
        call(model, "nosuch://bucket/checkpoints")
    assert not list(tmp_path.iterdir())

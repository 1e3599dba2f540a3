"""use("torch", tensor="dtensor"): a sharded model's state_dict holds DTensors, and takes those of any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import unidist
from tests import preloaded
from tests.keras.torch import state_dicts
from unidist.testing.processes import ProcessWorld


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    with ProcessWorld(
        2, env={"KERAS_BACKEND": "torch"}, setup=state_dicts.start, timeout=120, preload=preloaded.KERAS["torch"]
    ) as found:
        yield found


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["model", "turned", "zero3"])
def test_a_state_dict_holds_dtensors_on_the_memory_of_the_shards(world: ProcessWorld, kind: str) -> None:
    world.call(state_dicts.holds_dtensors, kind)


@pytest.mark.processes
@pytest.mark.parametrize(("source", "target"), [("model", "zero3"), ("zero1", "turned"), ("turned", "model")])
def test_a_checkpoint_is_read_under_another_layout(
    world: ProcessWorld, tmp_path: Path, source: str, target: str
) -> None:
    world.call(state_dicts.moves, str(tmp_path), source, target)


@pytest.mark.processes
def test_a_wrong_shape_is_told_by_name(world: ProcessWorld) -> None:
    for message in world.call(state_dicts.refuses_a_wrong_shape):
        assert "size mismatch" in message
        assert "up/kernel" in message


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(unidist.CapabilityError, match=r"tensor='other'.*native and dtensor"):
        unidist.use("torch", tensor="other")
    with pytest.raises(unidist.CapabilityError, match=r"'sim'.* has no option tensor"):
        unidist.use("sim", tensor="dtensor")

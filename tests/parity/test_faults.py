"""Checkpoints of processes where something goes wrong: all get an error, nothing half counts, and all goes on."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.samples import IN_MEMORY
from tests.parity.faults import is_of
from tests.parity.train import Spec
from tests.parity.worlds import MODEL_2, Alone, Worlds
from tests.support.sampling import SEED, unless_all
from unidist.checkpoint.remote import directory_of

pytestmark = pytest.mark.processes

_FAULTS = "tests.parity.faults"
_ZERO = replace(MODEL_2, zero=1)
STEPS = ["step-00000001", "step-00000002.tmp", "step-00000003"]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where nobody waits for a disk."""
    folder = Path(IN_MEMORY or tmp_path) / f"unidist-faults-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("at", [0, 1])
def test_a_full_disk_of_one_process_is_told_on_all(at: int, worlds: Worlds, tmp_path: Path) -> None:
    found = worlds.get("torch-2").call(f"{_FAULTS}:full_disk", str(tmp_path), MODEL_2, at, False)
    for place, (said, goes_on, names) in enumerate(found):
        assert [bool(text) for text in said] == [False, False, True, False, False, False]
        assert "No space left on device" in said[2]
        assert place == at or f"rank {at}: No space left on device" in said[2]
        assert goes_on
        assert names == STEPS


@pytest.mark.parametrize(("spec", "at"), [(MODEL_2, 1), (_ZERO, 0)], ids=["at the next save", "at wait"])
def test_what_goes_wrong_in_the_background_is_told_later(spec: Spec, at: int, worlds: Worlds, tmp_path: Path) -> None:
    found = worlds.get("torch-2").call(f"{_FAULTS}:full_disk", str(tmp_path), spec, at, True)
    for place, (said, goes_on, names) in enumerate(found):
        assert [bool(text) for text in said] == [False, False, False, True, False, False, False]
        assert place != at or "File too large" in said[3]
        assert goes_on
        assert names == STEPS


def test_a_folder_that_one_process_or_none_can_use_is_told_on_all(worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folders, saving, restoring in (
        ([tmp_path / "file"], "File exists", "has no checkpoint"),
        ([tmp_path / "here", tmp_path / "nowhere"], "No such file", "no checkpoint"),
    ):
        given = [str(folder) for folder in folders]
        found = worlds.get("torch-2").call(f"{_FAULTS}:save_and_restore", given, MODEL_2)
        for saved, restored in found:
            assert saving in saved
            assert restoring in restored or "No such file" in restored or "Not a directory" in restored


def test_facts_that_are_no_json_are_told_on_all(worlds: Worlds, tmp_path: Path) -> None:
    for saved, _ in worlds.get("torch-2").call(f"{_FAULTS}:save_and_restore", [str(tmp_path)], MODEL_2, {"x": {1, 2}}):
        assert "facts are JSON" in saved
    assert not list(tmp_path.iterdir())


def _flip(folder: Path, at: int) -> None:
    path = folder / "model-00001-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def _of_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / "step-00000001" / "model-00001-of-00001.safetensors", folder)


DAMAGES: dict[str, Callable[[Path], object]] = {
    # The last rows of the last tensor: one process alone reads them.
    "a bit of one process's": lambda folder: _flip(folder, -1),
    "a bit of all": lambda folder: _flip(folder, -4 * 40 - 9000),
    "cut": lambda folder: os.truncate(folder / "model-00001-of-00001.safetensors", 3000),
    "missing": lambda folder: (folder / "optimizer-00001-of-00001.safetensors").unlink(),
    "another step's": _of_another_step,
    "checksums": lambda folder: (folder / "checksums.safetensors").write_bytes(b"{}"),
    "manifest": lambda folder: (folder / "manifest.json").write_text("{}"),
}


@pytest.mark.parametrize(
    "setting", ["torch-2", *unless_all([], ["jax-2x2", "horovod-2", "tensorflow-2x2"])], ids=lambda name: name
)
def test_damage_is_told_on_all(setting: str, worlds: Worlds, tmp_path: Path) -> None:
    spec = MODEL_2 if setting.endswith("-2") else replace(MODEL_2, axes=(("model", 4),))
    world = worlds.get(setting)
    world.call(f"{_FAULTS}:write", str(tmp_path / "whole"), spec, (1, 2))
    for name, damage in DAMAGES.items():
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / "step-00000002")
        told = world.call(f"{_FAULTS}:restore", str(folder), spec)
        assert all(told), f"{name}: {told}"
    assert not any(world.call(f"{_FAULTS}:restore", str(tmp_path / "whole"), spec))


def test_whenever_all_are_killed_the_last_step_is_whole(worlds: Worlds, alone: Alone, memory: Path) -> None:
    """A copy of the folder after any change is what SIGKILL leaves: what was written stays in the system's memory."""
    count = unless_all(30, 200)
    folder = memory / "steps"
    worlds.get("torch-2").call(f"{_FAULTS}:save_until", str(folder), MODEL_2, SEED, count, None)
    copies = sorted((memory / "steps-copies").iterdir())
    assert len(copies) >= count
    found = alone.world("torch").call(f"{_FAULTS}:loads", [str(copy) for copy in copies])[0]
    for copy, (step, is_whole) in zip(copies, found, strict=True):
        saved = int(copy.name.rsplit("-", 1)[1])
        assert is_whole, copy.name
        assert saved <= step <= saved + 1, copy.name
    assert len({step for step, _ in found}) > 1


@pytest.mark.parametrize("at", unless_all([1], [0, 1]))
def test_whenever_one_is_killed_the_others_are_told_and_the_last_step_is_whole(
    at: int, worlds: Worlds, alone: Alone, memory: Path
) -> None:
    draw = random.Random(SEED + at)
    for round_ in range(unless_all(1, 10)):
        folder = memory / f"steps-{at}-{round_}"
        given = (str(folder), MODEL_2, SEED, draw.randrange(1, 60), at)
        outcomes = worlds.get("torch-2").outcomes(f"{_FAULTS}:save_until", *given)
        kinds = {k: outcome.failure.kind for k, outcome in outcomes.items() if outcome.failure is not None}
        assert kinds == {at: "ended", 1 - at: "ProcessLostError"}
        ((_, is_whole),) = alone.world("torch").call(f"{_FAULTS}:loads", [str(folder)])[0]
        assert is_whole


# DTensor traces for seconds each time that it is started.
@pytest.mark.parametrize(("setting", "few"), [("jax-2x2", 2), ("tensorflow-2x2", 1)])
def test_killed_at_any_moment_and_started_again_goes_on_from_the_last_step(
    setting: str, few: int, worlds: Worlds, alone: Alone, memory: Path
) -> None:
    """With --all 50 times; every third time what writes in the background is killed."""
    draw, spec = random.Random(SEED), replace(MODEL_2, axes=(("model", 4),))
    folder, steps, amid = memory / "steps", [0], 0
    for number in range(unless_all(few, 50)):
        given = (str(folder), spec, draw.uniform(0.1, 0.6), number % 3 == 2)
        outcomes = worlds.get(setting).outcomes(f"{_FAULTS}:save_until_killed", *given)
        assert [one.failure.kind for one in outcomes.values() if one.failure] == ["ended"] * 2, outcomes
        last = directory_of(folder).latest() or 0
        saved = int((memory / "steps-beside" / "saved").read_text() if last else 0)
        assert saved <= last <= saved + 2
        assert last == 0 or is_of(folder, last)
        steps.append(last)
        amid += any(folder.glob("*.tmp"))
    print(f"{len(steps) - 1} times killed, {amid} of them amid writing a step; the last of {steps[-1]} steps is there")
    ((step, is_whole),) = alone.world(setting.partition("-")[0]).call(f"{_FAULTS}:loads", [str(folder)])[0]
    assert is_whole
    assert step == steps[-1] > 0

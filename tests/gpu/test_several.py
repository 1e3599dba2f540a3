"""Several GPUs: collectives of a mesh of two axes in orders that are drawn, and a rank that is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.gpu import device
from tests.gpu.device import ON_GPU, needs
from tests.launch import runs

PROGRAMS = "tests.gpu.several"
SECONDS = 6
# NCCL's watchdog ends a process whose peer is gone, where it waits for the GPU and so hears of nothing.
ENDS = {"ProcessLostError", "ended"} if ON_GPU else {"ProcessLostError"}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 2), marks=needs(4)),
        pytest.param((1, 2), marks=needs(2)),
        pytest.param((2, 4), marks=needs(8, more_than_cpus=True)),
    ],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_two_axes_in_any_order(shape: tuple[int, int]) -> None:
    turns = 500 if ON_GPU else 60
    with device.ranks(shape[0] * shape[1]) as world:
        for wrong, count, most in world.call(f"{PROGRAMS}:stress", shape, turns):
            assert wrong == []
            assert count > 3 * turns
            assert most >= 4


@needs(2)
def test_a_killed_rank_ends_the_other() -> None:
    # What NCCL would write down of itself first takes longer than the rest.
    with device.ranks(2, UNIDIST_TIMEOUT=str(SECONDS), TORCH_NCCL_DUMP_ON_TIMEOUT="0") as world:
        pids, begun = world.pids, time.monotonic()
        found = world.outcomes(f"{PROGRAMS}:killed", 20)
        failures = {rank: one.failure for rank, one in found.items()}
        assert failures[1] is not None
        assert (failures[1].kind, failures[1].message) == ("ended", "the process ended with exit code -9")
        assert failures[0] is not None
        assert failures[0].kind in ENDS
    assert time.monotonic() - begun < 60
    assert [pid for pid in pids if runs.alive(pid)] == []


@needs(2)
def test_the_launcher_names_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    if not ON_GPU:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = str(Path(__file__).with_name("several.py"))
    done = runs.run(["-n", "2", "--timeout", str(SECONDS), "--log-dir", str(tmp_path), program], tmp_path)
    assert done.code not in (0, None)
    named = [line for line in done.err.splitlines() if line.startswith("unidist:") and "SIGKILL" in line]
    assert any("rank 1" in line for line in named), done.err
    assert done.seconds < 60
    assert os.listdir(tmp_path)

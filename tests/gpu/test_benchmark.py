"""benchmarks/gpu.py runs whole on the device, with small models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.device import DEVICE, ON_GPU
from tests.launch import runs

PROGRAM = str(runs.ROOT / "benchmarks" / "gpu.py")
FEW = ("--device", DEVICE, "--small", "--rounds", "2", "--steps", "1", "--variants", "float32,mixed_bfloat16")


@pytest.fixture(autouse=True)
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    if ON_GPU:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def test_it_compares_a_world_of_one() -> None:
    command = [sys.executable, PROGRAM, *FEW]
    done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unidist / Keras alone: ") == 6
    assert done.stdout.count(" / steps on data that is there: ") >= 2
    assert f"device: {DEVICE}" in done.stdout


def test_it_compares_sizes_in_a_world_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIDIST_TORCH_TRANSPORT", "gloo")
    done = runs.run(["-n", "2", PROGRAM, *FEW], tmp_path)
    assert done.code == 0, done.err
    said = done.of_rank(0)
    assert sum(" MiB / " in line for line in said) == 8

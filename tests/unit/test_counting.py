"""What a node has, as `unidist run` counts it: GPUs for `-n gpu`, and cores for the threads of each process."""

from __future__ import annotations

from pathlib import Path

import pytest

from unidist.backends import registry
from unidist.launch import counting
from unidist.launch.request import LaunchError, Request


@pytest.mark.parametrize(
    ("shown", "count"), [("0", 1), ("0,3", 2), ("GPU-1f,GPU-2e,MIG-3d", 3), ("1,-1,2", 1)], ids=str
)
def test_gpus_that_a_process_is_shown_are_counted(shown: str, count: int) -> None:
    assert counting.processes_of("gpu", {"CUDA_VISIBLE_DEVICES": shown}) == count


def test_else_those_that_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nprintf 'GPU 0: one (UUID: a)\\n  MIG 1g  Device 0: (UUID: b)\\nGPU 1: one (UUID: c)\\n'\n"
    )
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert counting.processes_of("gpu", {}) == 2


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}], ids=str)
def test_a_node_that_shows_none_is_refused(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="this node shows no GPU; give a number"):
        counting.processes_of("gpu", environ)


def test_processes_share_the_cores_on_which_they_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    job = registry.job("torch")(Request(backend="torch", command=("-m", "this"), processes=2))
    assert job.defaults()["OMP_NUM_THREADS"] == "3"

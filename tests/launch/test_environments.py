"""Scripts under other people's launchers: torchrun for real, and processes that see what srun sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.runs import environment, only_prefixed, run

pytestmark = pytest.mark.processes

TORCH = """
import torch, torch.distributed as dist
from unidist.backends.environment import detect

launch = detect()
if launch.launcher == "slurm":
    dist.init_process_group(
        "gloo", init_method=f"tcp://{launch.address}", world_size=launch.process_count, rank=launch.process_index
    )
else:
    dist.init_process_group("gloo")
value = torch.tensor([10.0 ** launch.process_index])
dist.all_reduce(value)
words = (launch.launcher, launch.process_index, launch.process_count, launch.local_index, int(value.item()))
# One write: the launcher's processes share their output.
print(" ".join(map(str, words)) + "\\n", end="", flush=True)
assert (dist.get_rank(), dist.get_world_size()) == (launch.process_index, launch.process_count)
dist.destroy_process_group()
"""

JAX = """
import jax
from unidist.backends.environment import detect

launch = detect()
jax.distributed.initialize(launch.address, launch.process_count, launch.process_index)
from jax.experimental import multihost_utils
total = multihost_utils.process_allgather(jax.numpy.ones(()) * 10.0 ** launch.process_index).sum()
words = (launch.launcher, launch.process_index, launch.process_count, launch.local_index, int(total))
print(" ".join(map(str, words)) + "\\n", end="", flush=True)
"""


def srun(command: Sequence[str], count: int, job: int) -> list[str]:
    """Starts the command `count` times with the variables of a Slurm step on this machine; what each printed last."""
    slurm = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_JOB_NODELIST": "localhost,nowhere[1-3]",
        "SLURM_STEP_NODELIST": "localhost",
    }
    tasks = [
        subprocess.Popen(
            command,
            env={**environment(), **slurm, "SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in range(count)
    ]
    said = []
    try:
        for task in tasks:
            out, err = task.communicate(timeout=120)
            assert task.returncode == 0, err
            said.append(out.splitlines()[-1])
    finally:
        for task in tasks:
            if task.poll() is None:
                task.kill()
                task.communicate()
    return said


@pytest.mark.parametrize("text", [TORCH, JAX], ids=["torch", "jax"])
def test_under_srun(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    said = srun([sys.executable, str(script)], 3, job=os.getpid())
    assert said == [f"slurm {k} 3 {k} 111" for k in range(3)]


def test_under_torchrun_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCH)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*torchrun, str(script)], env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"torchrun {k} 3 {k} 111" for k in range(3)]


def test_under_unidist_run_in_a_folder_with_misleading_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What another launcher said to the launcher is not said to its processes.
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "nowhere:1")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(JAX)
    for name in ("torch.py", "jax.py", "json.py", "runpy.py"):
        (tmp_path / name).write_text("raise ImportError('the wrong one')\n")
    done = run(["-n", "3", "--backend", "jax", "code/train.py"], tmp_path)
    assert done.code == 0, done.err
    assert only_prefixed(done.out)
    assert [done.of_rank(k)[-1] for k in range(3)] == [f"jax {k} 3 {k} 111" for k in range(3)]

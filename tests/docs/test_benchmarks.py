"""The benchmark of GPUs runs, as far as it can without one, and says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.docs.documents import ROOT


def run(*options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))
    env = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "benchmarks/gpu.py", *options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


def test_the_benchmark_of_gpus_runs_on_a_cpu() -> None:
    few = ("--variants", "float32", "--rounds", "2", "--steps", "1")
    done = run("--device", "cpu", "--small", "--only", "mlp,pack", *few)
    assert done.returncode == 0, done.stderr
    assert "device: cpu, a CPU: these are no figures of a GPU" in done.stdout
    for title in ("unidist / Keras alone", "into a bucket / a copy", "by rows / a copy", "by columns / a copy"):
        (ratio,) = re.findall(rf"^  .*{title}[\w ]*: ([0-9.]+) ", done.stdout, re.MULTILINE)
        assert float(ratio) > 0
    assert len(re.findall(r"[0-9.]+ GB/s read", done.stdout)) == 4


def test_a_part_that_does_not_exist_is_refused() -> None:
    done = run("--device", "cpu", "--only", "mlp,bert")
    assert done.returncode == 2
    assert "unknown: bert" in done.stderr

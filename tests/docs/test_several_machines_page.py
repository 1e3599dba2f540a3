"""The batch script and the manifest of examples/ start what docs/guide/several-machines.md says; the script is run."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.documents import ROOT
from tests.docs.forked import run_forked
from tests.docs.manifests import read
from unidist import cli
from unidist.launch.request import free_port

PAGE = "docs/guide/several-machines.md"
BATCH, MANIFEST = ROOT / "examples" / "slurm.sbatch", ROOT / "examples" / "kubernetes.yaml"
SAYS = 'echo "$UNIDIST_TOKEN $*" >> "$SAID"\nexit ${ENDS:-0}'
# What stands in for Slurm: srun runs its command once on each of two nodes, as it hands their numbers to them, and ends
# with the highest of their codes.
SLURM = {
    "srun": """while [[ $1 == --* ]]; do shift; done
for k in 0 1; do SLURM_NODEID=$k "$@" & pids[k]=$!; done
echo "${pids[@]}" > "$TASKS"
for k in 0 1; do wait ${pids[k]}; code=$?; (( code > worst )) && worst=$code; done
exit ${worst:-0}""",
    "scontrol": 'case $1 in\nshow) printf "$HOSTS" ;;\n*) echo "$@" >> "$SAID" ;;\nesac',
}


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    next(command for command in cli.commands() if command.name == "run").add(parser)
    return parser


def _programs(folder: Path, unidist: str) -> dict[str, str]:
    """The environment of a job's first node; `unidist`: what that program does."""
    for name, text in {**SLURM, "unidist": unidist}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SAID": str(folder / "said"), "TASKS": str(folder / "tasks")}
    return env | {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]", "HOSTS": "node7\\nnode8\\n"}


def _batch(folder: Path, ends: int) -> list[str]:
    """What the batch script calls, on two nodes whose `unidist run` ends with a code."""
    env = _programs(folder, SAYS) | {"ENDS": str(ends), "SLURM_JOB_ID": "42"}
    subprocess.run(["bash", BATCH, "--epochs", "3 4"], env=env, check=True, timeout=60)
    return (folder / "said").read_text().splitlines()


def test_the_batch_script_starts_one_launcher_a_node(tmp_path: Path) -> None:
    first, second = sorted(_batch(tmp_path, ends=0))
    token, *words = first.split()
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert second == first.replace("--node-rank 0", "--node-rank 1")
    assert words[0] == "run"
    asked = _run_parser().parse_args(words[1:])
    assert (int(asked.processes), asked.nodes, asked.node_rank, asked.address) == (8, 2, 0, "node7:20042")
    assert (asked.program, asked.arguments) == ("examples/resume.py", ["--epochs", "3", "4"])


def test_the_batch_script_puts_a_job_back_that_was_asked_to_end(tmp_path: Path) -> None:
    assert _batch(tmp_path, ends=75)[-1] == "requeue 42"


@pytest.mark.processes
@pytest.mark.slow
def test_a_job_whose_time_ends_is_put_back_and_goes_on_where_it_stood(tmp_path: Path) -> None:
    """By the real `unidist run` for each of two nodes, which are this machine.

    Without its 10 restarts, for which a server beside each process would import all that it does: none is needed.
    """
    env = os.environ | _programs(tmp_path, f'exec {sys.executable} -m unidist "${{@/#10/0}}"')
    env |= {"HOSTS": "127.0.0.1\\n", "SLURM_JOB_ID": str(free_port() - 20000), "PROCESSES": "1"}
    env |= {"KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join((os.environ["PYTHONPATH"], str(ROOT)))}
    run = tmp_path / "run"
    command = ["bash", str(BATCH), "--directory", str(run)]
    with subprocess.Popen([*command, "--pause", "0.3"], env=env, cwd=ROOT) as job:
        while not list(run.glob("step-*")):
            assert job.poll() is None
            time.sleep(0.1)
        for task in (tmp_path / "tasks").read_text().split():
            os.kill(int(task), signal.SIGUSR1)
        # They leave at once: none is held until the script's 110 seconds are over.
        job.wait(timeout=60)
    assert (tmp_path / "said").read_text().startswith("requeue ")
    last = max(int(step.name.removeprefix("step-")) for step in run.glob("step-*"))
    again = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    assert 5 <= last < 32
    assert f"goes on behind batch {last}\n" in again
    undisturbed = run_forked((ROOT / "examples" / "resume.py").read_text(), tmp_path, arguments=("--directory", "one"))
    found, wanted = (float(text.rpartition("loss ")[2]) for text in (again, undisturbed))
    assert found == pytest.approx(wanted, abs=1e-5)


def test_the_manifest_is_one_service_and_one_job(tmp_path: Path) -> None:
    text = MANIFEST.read_text()
    service, job = read("".join(line for line in text.splitlines(keepends=True) if not line.startswith("#")))
    pod = job["spec"]["template"]
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    # What the shell of the second pod starts.
    env = _programs(tmp_path, SAYS) | {"JOB_COMPLETION_INDEX": "1"}
    subprocess.run([*container["command"], *container["args"]], env=env, check=True, timeout=60)
    words = (tmp_path / "said").read_text().split()
    assert words[0] == "run"
    asked = _run_parser().parse_args(words[1:])
    assert (asked.nodes, asked.node_rank) == (job["spec"]["completions"], 1)
    assert asked.address.split(".")[0] == f"{job['metadata']['name']}-0"
    assert pod["spec"]["terminationGracePeriodSeconds"] > asked.grace
    assert (ROOT / asked.program).exists()
    assert asked.arguments[-1].startswith(f"{container['volumeMounts'][0]['mountPath']}/")


def test_commands_that_are_shown_can_be_parsed() -> None:
    text = (ROOT / PAGE).read_text()
    lines = re.findall(r"^unidist run (.*?)(?: +#.*)?$", text, flags=re.MULTILINE)
    assert lines
    for line in lines:
        _run_parser().parse_args(shlex.split(line))

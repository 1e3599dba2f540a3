"""The batch script and the manifest of docs/guide/several-machines.md start what it says, by commands that exist."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path

from tests.docs.documents import ROOT, blocks
from tests.docs.manifests import read
from unidist import cli

PAGE = "docs/guide/several-machines.md"
# What stands in for Slurm: srun runs its command once on each of two nodes, as it hands their numbers to them.
SLURM = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nfor k in 0 1; do SLURM_NODEID=$k "$@" || exit $?; done',
    "scontrol": 'case $1 in\nshow) printf "node7\\nnode8\\n" ;;\n*) echo "$@" >> "$SAID" ;;\nesac',
    "unidist": 'echo "$UNIDIST_TOKEN $*" >> "$SAID"\nexit ${ENDS:-0}',
}


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    next(command for command in cli.commands() if command.name == "run").add(parser)
    return parser


def _batch(folder: Path, ends: int) -> list[str]:
    """What the page's batch script calls, on two nodes whose `unidist run` ends with a code."""
    (script,) = [block.text for block in blocks(PAGE) if block.text.startswith("#!")]
    (folder / "train.sbatch").write_text(script)
    for name, text in SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    said = folder / "said"
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SAID": str(said), "ENDS": str(ends)}
    env |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "42"}
    subprocess.run(["bash", str(folder / "train.sbatch")], env=env, check=True, timeout=60)
    return said.read_text().splitlines()


def test_the_batch_script_starts_one_launcher_a_node(tmp_path: Path) -> None:
    first, second = _batch(tmp_path, ends=0)
    token, *words = first.split()
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert second == first.replace("--node-rank 0", "--node-rank 1")
    assert words[0] == "run"
    asked = _run_parser().parse_args(words[1:])
    assert (int(asked.processes), asked.nodes, asked.node_rank, asked.address) == (8, 2, 0, "node7:29500")


def test_the_batch_script_puts_a_job_back_that_was_asked_to_end(tmp_path: Path) -> None:
    assert _batch(tmp_path, ends=75)[-1] == "requeue 42"


def test_the_manifest_is_one_service_and_one_job() -> None:
    (text,) = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    service, job = read(text)
    pod = job["spec"]["template"]
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    program, *words = shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", "1").removeprefix("exec "))
    assert (program, words[0]) == ("unidist", "run")
    asked = _run_parser().parse_args(words[1:])
    assert (asked.nodes, asked.node_rank) == (job["spec"]["completions"], 1)
    assert asked.address.split(".")[0] == f"{job['metadata']['name']}-0"
    assert pod["spec"]["terminationGracePeriodSeconds"] > asked.grace


def test_commands_that_are_shown_can_be_parsed() -> None:
    text = (ROOT / PAGE).read_text()
    lines = re.findall(r"^unidist run (.*?)(?: +#.*)?$", text, flags=re.MULTILINE)
    assert lines
    for line in lines:
        _run_parser().parse_args(shlex.split(line))

"""`unidist doctor -n` with real processes: worlds in order on every backend, and one with a wrong and a late link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.docs.documents import blocks
from tests.launch.runs import ROOT, alive, environment
from tests.visible import WITH_TENSORFLOW
from unidist.doctor import world
from unidist.launch.request import free_port

pytestmark = pytest.mark.processes
FAULTS = Path(__file__).with_name("doctor_faults.py")
# As the command runs it, and then what this process has imported.
PROGRAM = """
import json, sys
from unidist import cli
code = cli.main(["doctor", *sys.argv[1:]])
print(json.dumps(sorted(sys.modules)))
sys.exit(code)
"""


def start(arguments: Sequence[str], folder: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, *arguments],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """What it printed, and the modules that the command's own process had imported."""
    try:
        out, err = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=30)
        raise AssertionError(f"not done\n{out}\n{err}") from None
    text, _, modules = out.rstrip().rpartition("\n")
    assert modules, err
    return text, json.loads(modules)


def of_world(document: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in document["checks"] if check["section"] == "world"}


def test_it_finds_this_machine_in_order_as_a_person_sees_it(tmp_path: Path) -> None:
    """By the command of docs/watching.md."""
    (command,) = (block.text.split() for block in blocks("docs/watching.md") if block.language == "bash")
    assert command[:2] == ["unidist", "doctor"]
    text, modules = finish(start(command[2:], tmp_path, environment()))
    lines = text.splitlines()
    titles = ["versions", "machine", "network", "environment", "world"]
    assert [line for line in lines if line in titles] == titles
    assert lines[-1].endswith("nothing failed")
    assert any(line.split()[:2] == ["ok", "links"] and "1 of 1 are right" in line for line in lines), text
    for title in ("latency", "bandwidth"):
        top = next(k for k, line in enumerate(lines) if line.startswith(title))
        rows = [line.split() for line in lines[top + 1 : top + 4]]
        assert rows[0] == ["0", "1"]
        for rank, row in enumerate(rows[1:]):
            assert row[0] == str(rank)
            assert row[1 + rank] == "-"
            assert all(float(cell) > 0 for k, cell in enumerate(row[1:]) if k != rank)
    assert not {"keras", "torch", "jax", "tensorflow", "horovod"} & set(modules)


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "horovod"])
def test_two_processes_of_each_other_backend(backend: str, tmp_path: Path) -> None:
    environ = environment()
    if backend == "tensorflow":
        environ |= {**WITH_TENSORFLOW, "PYTHONPATH": str(ROOT)}
    text, _ = finish(start(["-n", "2", "--backend", backend, "--json"], tmp_path, environ))
    document = json.loads(text)
    assert set(of_world(document).values()) == {"ok"}, text
    assert {"world all_reduce", "world all_gather", "links", "same versions"} <= set(of_world(document))
    (link,) = document["links"]
    assert link["ranks"] == [0, 1]
    assert all(link[what][rank] > 0 for what in ("latency_us", "bandwidth_mib_s") for rank in ("0", "1"))
    assert len({process["pid"] for process in document["processes"]}) == 2


def test_two_nodes_know_of_each_other(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    both = [
        start(["--nodes", "2", "--node-rank", k, "--address", address, "--json"], tmp_path, environment())
        for k in ("0", "1")
    ]
    for process in both:
        document = json.loads(finish(process)[0])
        assert set(of_world(document).values()) == {"ok"}, document
        assert [process["process"] for process in document["processes"]] == [0, 1]
        assert set(document["links"][0]["latency_us"]) == {"0", "1"}


def test_a_wrong_value_and_a_late_link_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    asked = world.request("torch", 3, timeout=4.0)
    reports = world.run(replace(asked, command=(str(FAULTS), asked.command[-1])))
    checks, links = world.judge(reports)
    assert [(link.pair, link.status) for link in links] == [((0, 1), "failed"), ((0, 2), "ok"), ((1, 2), "failed")]
    told = {check.name: check for check in checks if check.status == "failed"}
    assert set(told) == {"link 0-1", "link 1-2"}
    assert "rank 1 got from rank 0: 16 of 16 values are wrong" in told["link 0-1"].found
    assert "nothing came for 4 s in permute (doctor_faults.py:" in told["link 1-2"].found
    for check in told.values():
        assert "all links that failed have rank 1, process 1" in check.advice
    assert {c.status for c in checks if c.name.startswith("world all_")} == {"not checked"}
    assert len(reports.facts) == 3
    assert not any(alive(facts["pid"]) for facts in reports.facts.values())

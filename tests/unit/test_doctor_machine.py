"""`unidist doctor` on one machine: each check in environments that were made up, most of them broken on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor_checks import is_said, of, resolved
from unidist import cli
from unidist.backends import registry
from unidist.doctor import backends, machine, network, versions, world
from unidist.doctor.links import Task
from unidist.doctor.reports import Reports
from unidist.launch import Request
from unidist.launch.request import free_port

GIB = 2**30
HEALTHY = machine.Machine(
    cores=16, quota=None, memory=64 * GIB, memory_limit=None, shared=8 * GIB, files=(65536, 65536)
)
RANGES = versions.Ranges(
    python=">=3.11",
    requires=["numpy>=1.26", 'keras<3.17,>=3.15; extra == "torch"', 'torch>=2.13; extra == "torch"'],
)


# versions


def test_versions_within_their_ranges_are_in_order() -> None:
    found = {"python": "3.12.1", "keras-unidist": "0.1.0", "numpy": "2.4.6", "keras": "3.16.0", "torch": "2.14.0+cpu"}
    checks = versions.check(found, RANGES)
    assert {check.name: check.status for check in checks} == {
        **dict.fromkeys(found, "ok"),
        **dict.fromkeys(("keras-hub", "jax", "tensorflow", "horovod"), "not checked"),
    }
    assert of(checks, "jax").found == "not installed"


@pytest.mark.parametrize(
    ("name", "version", "advice"),
    [
        ("python", "3.10.4", "another Python"),
        ("numpy", "1.25.9", 'pip install "numpy>=1.26"'),
        ("keras", "3.17.0", "<3.17"),
        ("keras", "3.9.2", ">=3.15"),
        ("torch", "2.9.1+cu128", 'pip install "torch>=2.13"'),
    ],
)
def test_a_version_out_of_its_range_fails(name: str, version: str, advice: str) -> None:
    found = {"python": "3.11.7", "numpy": "2.0", "keras": "3.15.1", "torch": "2.13.0", name: version}
    checks = versions.check(found, RANGES)
    is_said(of(checks, name), "failed", version, advice)
    assert [check.name for check in checks if check.status == "failed"] == [name]


def test_a_nightly_build_counts_by_its_number() -> None:
    found = {"python": "3.11.7", "torch": "2.15.0.dev20261101+cu130"}
    assert of(versions.check(found, RANGES), "torch").status == "ok"


def test_without_metadata_no_range_is_taken_for_kept() -> None:
    checks = versions.check({"python": "3.11.7", "torch": "2.13"}, None)
    assert {check.status for check in checks} == {"not checked"}
    assert [check.name for check in checks if check.advice] == ["keras-unidist"], "the reason comes once"
    assert {of(checks, name).found for name in ("torch", "jax")} == {"2.13", "not installed"}


def test_what_is_installed_here_is_known_without_importing_it() -> None:
    found = versions.installed()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"numpy", "torch"} <= set(found)


# the machine


def test_a_healthy_machine() -> None:
    checks = machine.check(HEALTHY, {"OMP_NUM_THREADS": "4"}, 4, 4)
    assert [check.status for check in checks] == ["ok"] * 5
    assert of(checks, "cores").found == "16"


@pytest.mark.parametrize(
    ("changes", "environ", "name", "status", "found", "advice"),
    [
        ({}, {"OMP_NUM_THREADS": "16"}, "threads", "warning", "4 processes, 16 cores", "OMP_NUM_THREADS=4"),
        ({}, {"OMP_NUM_THREADS": "many"}, "threads", "failed", "'many' is no number", "OMP_NUM_THREADS=4"),
        ({"quota": 2.0}, {}, "threads", "warning", "16 threads, and 2 can run", "OMP_NUM_THREADS=1"),
        ({"memory": 3 * GIB}, {}, "memory", "warning", "3.0 GiB for 4 processes", "fewer processes"),
        ({"memory_limit": 2 * GIB}, {}, "memory", "warning", "2.0 GiB for 4", "fewer processes"),
        ({"shared": 64 * 2**20}, {}, "shared memory", "warning", "64 MiB", "--shm-size"),
        ({"files": (300, 4096)}, {}, "open files", "warning", "300", "ulimit -n 320"),
        ({"files": (64, 64)}, {}, "open files", "failed", "64", "the hard limit is lower"),
    ],
)
def test_a_machine_that_lacks_something(
    changes: dict[str, Any], environ: dict[str, str], name: str, status: str, found: str, advice: str
) -> None:
    checks = machine.check(replace(HEALTHY, **changes), environ, 4, 4)
    is_said(of(checks, name), status, found, advice)
    assert [check.name for check in checks if check.status != "ok"] == [name]


def test_connections_to_all_nodes_count_as_open_files() -> None:
    checks = machine.check(replace(HEALTHY, files=(1024, 4096)), {}, 4, 64)
    is_said(of(checks, "open files"), "warning", "1024", "ulimit -n 1280")


def test_what_the_system_does_not_tell_is_not_in_order() -> None:
    checks = machine.check(replace(HEALTHY, shared=None), {}, 1, 1)
    assert {check.name for check in checks if check.status == "not checked"} == {"shared memory"}


def test_limits_of_a_container_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    found = machine.look(tmp_path)
    assert (found.quota, found.memory_limit) == (2.5, 3 * GIB)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    found = machine.look(tmp_path)
    assert (found.quota, found.memory_limit) == (None, None)
    assert found.cores >= 1
    assert found.memory > 0


# backends


def test_backends_by_what_their_processes_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Entry(target="a.b:C", hint="pip install it", requires=("no_such_module",))
    near = replace(entry, requires=())
    monkeypatch.setattr(registry, "_entries", {"near": near, "jax": replace(near, accelerators=True), "far": entry})
    told = {
        "near": {"error": "libx.so: cannot open"},
        "jax": {"devices": ["cpu:0", "cpu:1"], "keras": {"error": "Keras 2.0 does not have Layer.call"}},
    }
    checks = backends.check(told.__getitem__, cards=0)
    is_said(of(checks, "backend near"), "failed", "libx.so", "pip install it")
    assert of(checks, "backend jax").found == "2 cpu"
    assert of(checks, "backend jax").status == "ok"
    is_said(of(checks, "backend far"), "not checked", "not installed", "needs no_such_module: pip install it")
    is_said(of(checks, "Keras on jax"), "failed", "Keras 2.0 does not have", "another Keras")
    assert not any(check.name == "Keras on near" for check in checks)
    blind = backends.check(told.__getitem__, cards=8)
    is_said(of(blind, "backend jax"), "warning", "this machine has 8 NVIDIA cards", "CUDA_VISIBLE_DEVICES")


def test_a_backend_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a launcher says to the command is not said to the probe, which would join its world.
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    told = backends.ask_a_process("sim")
    assert told["devices"]
    assert backends.judge_keras("sim", told["keras"]).status == "ok"
    assert told["keras"]["replaced"] > 40
    assert "unknown backend" in backends.ask_a_process("toch")["error"]
    assert "longer than 0.01 s" in backends.ask_a_process("sim", 0.01)["error"]


def test_cards_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert backends.count_cards(tmp_path) == 2


# the command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started for the backends, and nothing of the shell that the tests run in is wrong."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backends, "ask_a_process", lambda name: {"devices": ["cpu:0"]})
    monkeypatch.setattr(network, "addresses", resolved("127.0.0.1"))


def test_the_command_tells_what_is_wrong_and_fails_by_it(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("nothing failed")
    monkeypatch.setenv("RANK", "3")
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.rstrip().endswith("not in order")
    line = next(k for k, text in enumerate(said.splitlines()) if "FAILED" in text)
    three = said.splitlines()[line : line + 3]
    assert [word in text for word, text in zip(("asked:", "found:", "to do:"), three, strict=True)] == [True] * 3
    assert "RANK=3 without WORLD_SIZE" in three[1]
    assert cli.main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [check["found"] for check in document["checks"] if check["status"] == "failed"] == [
        "RANK=3 without WORLD_SIZE, MASTER_ADDR, MASTER_PORT: half of what torchrun sets"
    ]
    assert document["links"] == document["processes"] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "0"], "processes (-n) must be 1 or more"),
        (["--nodes", "2"], "--address host:port"),
        (["-n", "2", "--backend", "sim"], "in one process"),
        (["-n", "2", "--backend", "toch"], "unknown backend 'toch'"),
        (["-n", "2", "--timeout", "0"], "timeout must be more than 0"),
    ],
)
def test_what_cannot_be_examined(
    arguments: list[str], text: str, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_options_reach_the_launcher(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Request] = []

    def run(request: Request) -> Reports:
        seen.append(request)
        return Reports(request=request, told=[], code=1)

    monkeypatch.setattr(world, "run", run)
    address = f"127.0.0.1:{free_port()}"
    options = ["-n", "4", "--backend", "jax", "--nodes", "2", "--node-rank", "1", "--address", address]
    assert cli.main(["doctor", *options, "--devices-per-process", "2", "--timeout", "90"]) == 1
    (request,) = seen
    assert (request.backend, request.processes, request.nodes, request.node_rank) == ("jax", 4, 2, 1)
    assert (request.address, request.devices_per_process) == (address, 2)
    assert request.command[:2] == ("-m", "unidist.doctor.worker")
    task = Task.read(request.command[2])
    assert (task.backend, task.processes, task.timeout, task.joining) == ("jax", 4, 90.0, 90.0)
    assert "4 processes of jax" in capsys.readouterr().err


def test_the_commands_own_process_imports_no_framework() -> None:
    program = (
        "import json, sys\n"
        "from unidist import cli\n"
        "from unidist.doctor import backends\n"
        "backends.SECONDS = 120.0\n"
        "asked = []\n"
        "backends.ask_a_process = lambda name: asked.append(name) or {'devices': ['cpu:0']}\n"
        "cli.main(['doctor', '--json'])\n"
        "print(json.dumps([asked, sorted(sys.modules)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    names, modules = json.loads(done.stdout.splitlines()[-1])
    assert "torch" in names
    heavy = {"keras", "keras_hub", "torch", "jax", "jaxlib", "tensorflow", "horovod"}
    assert not heavy & set(modules)


def test_each_check_has_its_place(quick: None) -> None:
    found = world.examine(None)
    assert list(found.sections) == ["versions", "machine", "network", "environment", "backends"]
    for check in found.checks:
        assert check.asked
        assert check.found
        assert check.status == "ok" or check.advice or check.status == "not checked", check

"""`unidist doctor` on one machine: each check in environments that were made up, most of them broken on purpose."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unidist import cli
from unidist.backends import registry
from unidist.doctor import backends, examination, launchers, machine, network, versions
from unidist.doctor.check import Check
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
CARDS = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5", "docker0": "172.17.0.1"}


def of(checks: Sequence[Check], name: str) -> Check:
    found = [check for check in checks if check.name == name]
    assert len(found) == 1, [check.name for check in checks]
    return found[0]


def asked(**changes: Any) -> Request:
    return Request(**{"backend": "torch", "command": ("-m", "x"), **changes})


def is_said(check: Check, status: str, found: str, advice: str) -> None:
    """Whoever reads the line knows what was asked, what was found and what to do."""
    assert check.status == status, check
    assert check.asked
    assert found in check.found, check
    assert advice in check.advice, check
    assert check.advice


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
    assert all("not installed" in check.found and check.advice for check in checks)


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
        ({"quota": 2.0}, {}, "threads", "warning", "16 threads, of which 2 can run", "OMP_NUM_THREADS=1"),
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


def test_what_the_system_does_not_tell_is_not_in_order() -> None:
    checks = machine.check(replace(HEALTHY, memory=None, shared=None), {}, 1, 1)
    assert {check.name for check in checks if check.status == "not checked"} == {"memory", "shared memory"}


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
    assert found.memory is None or found.memory > 0


# the network


def resolved(*addresses: str) -> Callable[[str], list[str]]:
    return lambda name: list(addresses)


def unresolved(name: str) -> list[str]:
    raise socket.gaierror(-2, "Name or service not known")


def test_a_hostname_that_does_not_resolve() -> None:
    check = network.hostname("node7", 1, unresolved)
    is_said(check, "failed", "'node7' does not resolve", "/etc/hosts")


@pytest.mark.parametrize(("nodes", "status"), [(1, "warning"), (2, "failed")])
def test_a_hostname_that_leads_to_the_loopback(nodes: int, status: str) -> None:
    check = network.hostname("node7", nodes, resolved("127.0.1.1"), lambda address: True)
    is_said(check, status, "node7 is 127.0.1.1: the loopback", "GLOO_SOCKET_IFNAME")


def test_a_hostname_that_leads_to_another_machine() -> None:
    check = network.hostname("node7", 1, resolved("10.0.0.9"), lambda address: False)
    is_said(check, "failed", "this machine has no address 10.0.0.9", "/etc/hosts")


def test_a_hostname_that_others_reach() -> None:
    assert network.hostname("node7", 2, resolved("10.0.0.5"), lambda address: True).status == "ok"


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    monkeypatch.setattr(network, "_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [held.wait(20)][:0])
    with pytest.raises(OSError, match=r"no answer within 0\.1 s"):
        network.addresses("node7")
    held.set()


def test_the_loopback_of_this_machine_carries_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.loopback().status == "ok"
    monkeypatch.setattr(network, "free_port", lambda: 1 << 15)
    monkeypatch.setattr(network, "LOOPBACK", "203.0.113.77")  # for documents: nobody has it
    is_said(network.loopback(), "failed", "assign requested address", "ip link set lo up")


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"])
def test_an_interface_that_does_not_exist(variable: str) -> None:
    checks = network.interfaces({variable: "enp9s0"}, CARDS, lambda name: True, ["10.0.0.5"])
    is_said(of(checks, variable), "failed", "enp9s0", "unset it")
    assert "lo, eth0, ib0, docker0" in of(checks, variable).found


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_down(variable: str) -> None:
    checks = network.interfaces({variable: "ib0"}, CARDS, lambda name: name != "ib0", ["10.0.0.5"])
    is_said(of(checks, variable), "failed", "ib0 is down", "ip link set ib0 up")


def test_interfaces_that_are_taken_by_themselves() -> None:
    checks = network.interfaces({}, CARDS, lambda name: True, ["10.0.0.5"])
    assert "eth0, with the address 10.0.0.5" in of(checks, "gloo's interface").found
    assert of(checks, "NCCL's interface").found.endswith("ib0")
    lost = of(network.interfaces({}, CARDS, lambda name: True, []), "gloo's interface")
    is_said(lost, "not checked", "leads nowhere", "GLOO_SOCKET_IFNAME=ONE OF lo, eth0")


@pytest.mark.parametrize(
    ("named", "chosen"),
    [
        ("eth", ["eth0"]),
        ("=eth", []),
        ("=eth0,ib0", ["eth0", "ib0"]),
        ("^docker,lo", ["eth0", "ib0"]),
        ("^=eth0", ["ib0", "docker0"]),
    ],
)
def test_what_nccl_means_by_names_of_interfaces(named: str, chosen: list[str]) -> None:
    assert network.matching(named, CARDS) == chosen


@pytest.mark.parametrize(
    ("environ", "used", "status"),
    [
        ({}, ["jax"], "ok"),
        ({"http_proxy": "http://proxy:3128"}, ["jax"], "failed"),
        ({"https_proxy": "http://proxy:3128"}, ["torch", "tensorflow"], "failed"),
        ({"http_proxy": "http://proxy:3128"}, ["torch", "horovod"], "ok"),
        ({"HTTP_PROXY": "http://proxy:3128"}, ["jax"], "ok"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "example.org,localhost"}, ["jax"], "failed"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "example.org, 127.0.0.1"}, ["jax"], "ok"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "127.0.0.0/8"}, ["jax"], "ok"),
        ({"grpc_proxy": "http://proxy:3128", "no_proxy": "*"}, ["jax"], "ok"),
    ],
)
def test_a_proxy_between_processes_of_one_machine(environ: dict[str, str], used: list[str], status: str) -> None:
    check = network.proxies(environ, "127.0.0.1", used)
    assert check.status == status
    if status == "failed":
        is_said(check, "failed", "hang", "127.0.0.1")


def test_the_meeting_place() -> None:
    assert network.meeting_place(asked()) == []
    good = asked(nodes=2, address=f"127.0.0.1:{free_port()}")
    assert [check.status for check in network.meeting_place(good)] == ["ok"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = asked(nodes=2, address=f"127.0.0.1:{server.getsockname()[1]}")
        is_said(*network.meeting_place(taken), "failed", "something listens there already", "another port")  # type: ignore[call-arg]
        # Another node does not listen there itself.
        assert network.meeting_place(replace(taken, node_rank=1))[0].status == "ok"


@pytest.mark.parametrize(
    ("lookup", "own", "found", "advice"),
    [
        (unresolved, True, "'node0' does not resolve", "IP:PORT"),
        (resolved("127.0.1.1"), True, "the loopback, where other nodes find themselves", "IP:PORT"),
        (resolved("10.0.0.9"), False, "another machine's address", "--node-rank 0"),
    ],
)
def test_a_meeting_place_that_cannot_be(lookup: network.Lookup, own: bool, found: str, advice: str) -> None:
    checks = network.meeting_place(asked(nodes=2, address="node0:29500"), lookup, lambda address: own)
    is_said(of(checks, "address"), "failed", found, advice)


# the environment


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "LOCAL_RANK": "0"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a"},
        {"UNIDIST_BACKEND": "horovod", "KERAS_BACKEND": "tensorflow"},
    ],
)
def test_environments_without_a_contradiction(environ: dict[str, str]) -> None:
    assert [check.status for check in launchers.check(environ)] == ["ok"]


@pytest.mark.parametrize(
    ("environ", "found", "advice"),
    [
        ({"RANK": "0"}, "RANK=0 without WORLD_SIZE", "unset RANK"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "without RANK", "unset WORLD_SIZE"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "without JAX_COORDINATOR_ADDRESS", "unset"),
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2 without HOROVOD_RANK", "unset HOROVOD_SIZE"),
        ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "2"}, "must be one of 0..1", "unset HOROVOD_RANK"),
        ({"HOROVOD_RANK": "two", "HOROVOD_SIZE": "2"}, "should be numbers", "unset"),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "4"}, "should be numbers", "unset"),
        ({"UNIDIST_BACKEND": "toch"}, "UNIDIST_BACKEND=toch", "torch"),
        ({"UNIDIST_BACKEND": "torch", "KERAS_BACKEND": "jax"}, "must run on torch", "unset KERAS_BACKEND"),
        (
            {
                **{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
                **{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4"},
            },
            "torchrun says process 0 of 2; Horovod says process 0 of 4",
            "unset what an earlier job has left",
        ),
    ],
)
def test_variables_that_contradict_each_other(environ: dict[str, str], found: str, advice: str) -> None:
    checks = launchers.check(environ)
    assert len(checks) == 1
    is_said(checks[0], "failed", found, advice)


# backends


def test_backends_by_what_their_processes_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Entry(target="a.b:C", hint="pip install it", requires=("no_such_module",))
    known = {"near": replace(entry, requires=()), "jax": replace(entry, requires=()), "far": entry}
    monkeypatch.setattr(registry, "_entries", known)
    monkeypatch.setattr(registry, "entries", lambda: known)
    told = {"near": {"error": "libx.so: cannot open"}, "jax": {"devices": ["cpu:0", "cpu:1"]}}
    checks = backends.check(told.__getitem__, cards=0)
    is_said(of(checks, "backend near"), "failed", "libx.so", "pip install it")
    assert of(checks, "backend jax").found == "2 cpu"
    assert of(checks, "backend jax").status == "ok"
    is_said(of(checks, "backend far"), "not checked", "not installed", "needs no_such_module: pip install it")
    blind = backends.check(told.__getitem__, cards=8)
    is_said(of(blind, "backend jax"), "warning", "the machine has 8 NVIDIA cards", "CUDA_VISIBLE_DEVICES")


def test_a_backend_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a launcher says to the command is not said to the probe, which would join its world.
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert backends.ask_a_process("sim")["devices"]
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
        (["-n", "0"], "processes must be 1 or more"),
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
    found = examination.examine(None)
    assert list(found.sections) == ["versions", "machine", "network", "environment", "backends"]
    for check in found.checks:
        assert check.asked
        assert check.found
        assert check.status == "ok" or check.advice or check.status == "not checked", check

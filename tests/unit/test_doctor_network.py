"""`unidist doctor`: the network and the variables of launchers, made up and most of them broken on purpose."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.doctor_checks import is_said, of, resolved
from unidist.doctor import network, world
from unidist.launch import Request
from unidist.launch.request import free_port

CARDS = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5", "docker0": "172.17.0.1"}


def asked(**changes: Any) -> Request:
    return Request(**{"backend": "torch", "command": ("-m", "this"), **changes})


# the network


def unresolved(name: str) -> list[str]:
    raise socket.gaierror(-2, "Name or service not known")


EITHER = pytest.mark.parametrize(("nodes", "status"), [(1, "warning"), (2, "failed")])


@EITHER
def test_a_hostname_that_does_not_resolve(nodes: int, status: str) -> None:
    check = network.hostname("node7", nodes, unresolved)
    is_said(check, status, "'node7' does not resolve", "/etc/hosts")


@EITHER
def test_a_hostname_that_leads_to_the_loopback(nodes: int, status: str) -> None:
    check = network.hostname("node7", nodes, resolved("127.0.1.1"), lambda address: True)
    is_said(check, status, "node7 is 127.0.1.1: the loopback", "GLOO_SOCKET_IFNAME")


@EITHER
def test_a_hostname_that_leads_to_another_machine(nodes: int, status: str) -> None:
    check = network.hostname("node7", nodes, resolved("10.0.0.9"), lambda address: False)
    is_said(check, status, "this machine has no address 10.0.0.9", "/etc/hosts")


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
    address = f"127.0.0.1:{free_port()}"
    assert network.meeting_place(address, asked(nodes=2, address=address)).status == "ok"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        taken = asked(nodes=2, address=address)
        is_said(network.meeting_place(address, taken), "failed", "something listens there already", "another port")
        # Another node does not listen there itself.
        assert network.meeting_place(address, replace(taken, node_rank=1)).status == "ok"


@pytest.mark.parametrize(
    ("lookup", "own", "found", "advice"),
    [
        (unresolved, True, "'node0' does not resolve", "IP:PORT"),
        (resolved("127.0.1.1"), True, "the loopback, where other nodes find themselves", "IP:PORT"),
        (resolved("10.0.0.9"), False, "another machine's address", "--node-rank 0"),
    ],
)
def test_a_meeting_place_that_cannot_be(lookup: network.Lookup, own: bool, found: str, advice: str) -> None:
    address = "node0:29500"
    check = network.meeting_place(address, asked(nodes=2, address=address), lookup, lambda address: own)
    is_said(check, "failed", found, advice)


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
    assert [check.status for check in world.check(environ)] == ["ok"]


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
            "horovod says process 0 of 4; torchrun says process 0 of 2",
            "unset what an earlier job has left",
        ),
    ],
)
def test_variables_that_contradict_each_other(environ: dict[str, str], found: str, advice: str) -> None:
    checks = world.check(environ)
    assert len(checks) == 1
    is_said(checks[0], "failed", found, advice)

"""GPUs as the torch backend sees them, on machines that have none: devices, transports, and worlds that share one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unidist
from tests import preloaded
from tests.torch import accelerators as programs
from tests.torch.test_conformance import world as laws_world
from unidist.backends.torch import accelerators
from unidist.errors import BackendNotAvailableError, CapabilityError, MeshError
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World
from unidist.testing.processes import ProcessWorld


def run(program: str, **environment: str) -> list[Any]:
    """A program in two processes under torchrun's environment."""
    with ProcessWorld(2, launcher="torchrun", env=environment, timeout=60, preload=preloaded.TORCH) as world:
        return world.call(f"tests.torch.accelerators:{program}")


# which device ---------------------------------------------------------------------------------------------------------


def test_a_process_takes_the_device_of_its_number_on_the_host() -> None:
    with programs.cuda(4) as current:
        assert accelerators.bind("cuda", 3) == torch.device("cuda", 3)
        assert current[-1] == torch.device("cuda", 3)
        assert accelerators.bind("cpu", 3) == torch.device("cpu")


def test_a_process_that_sees_one_device_takes_that() -> None:
    with programs.cuda(1):
        assert accelerators.bind("cuda", 3) == torch.device("cuda", 0)


def test_a_process_alone_stays_on_the_current_device() -> None:
    with programs.cuda(4) as current:
        current.append(torch.device("cuda", 2))
        assert accelerators.bind("cuda", None) == torch.device("cuda", 2)


def test_a_process_without_a_device_of_its_own_is_told_so() -> None:
    with (
        programs.cuda(2),
        pytest.raises(BackendNotAvailableError, match=r"process 2 of this host .* but 2 are visible"),
    ):
        accelerators.bind("cuda", 2)


def test_over_the_host_processes_may_share_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(accelerators.TRANSPORT, "gloo")
    with programs.cuda(2):
        assert accelerators.bind("cuda", 3) == torch.device("cuda", 1)


@pytest.mark.parametrize(("said", "kind", "device"), [("cpu", "cpu", "cpu"), ("cuda:1", "cuda", "cuda:1")])
def test_what_keras_was_told_counts(monkeypatch: pytest.MonkeyPatch, said: str, kind: Any, device: str) -> None:
    monkeypatch.setenv(accelerators.KERAS_DEVICE, said)
    with programs.cuda(2):
        assert accelerators.preferred() == kind
        assert str(accelerators.bind(kind, 0)) == device


def test_without_a_word_gpus_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(accelerators.KERAS_DEVICE, raising=False)
    assert accelerators.preferred() == "cpu"
    with programs.cuda(1):
        assert accelerators.preferred() == "cuda"


def test_keras_is_told_a_number_where_there_are_several() -> None:
    with programs.cuda(2):
        assert accelerators.name_for_keras(torch.device("cuda", 1)) == "cuda:1"
        assert accelerators.name_for_keras(torch.device("cpu")) == "cpu"
    with programs.cuda(1):
        assert accelerators.name_for_keras(torch.device("cuda", 0)) == "cuda"


# what carries their tensors -------------------------------------------------------------------------------------------


def test_cpu_tensors_go_over_gloo_beside_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerators.transports("cuda") == "cpu:gloo,cuda:nccl"
    assert accelerators.transports("cpu") == "gloo"
    monkeypatch.setenv(accelerators.TRANSPORT, "gloo")
    assert accelerators.transports("cuda") == "gloo"


def test_another_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(accelerators.TRANSPORT, "mpi")
    with pytest.raises(CapabilityError, match=r"UNIDIST_TORCH_TRANSPORT must be .* found 'mpi'"):
        accelerators.transports("cuda")


def test_a_group_for_gpus_alone_gets_gloo_beside_it() -> None:
    for sums, told, default in run("with_a_group_for_gpus_alone"):
        assert sums == [3.0] * 3
        assert told == "cpu:gloo,cuda:gloo"
        assert default == "cuda:gloo"


def test_a_group_that_is_bound_to_a_device_is_not_split() -> None:
    found = run("with_a_bound_group")
    assert [total for total, _ in found] == [2.0, 2.0]
    assert [bound for _, bound in found] == ["cuda:0", "cuda:1"]


def test_a_group_of_the_program_says_its_device() -> None:
    assert run("with_devices_of_the_program") == [["cuda:3", "cuda:2"]] * 2


def test_nccl_is_made_ready_beforehand_and_left_at_the_end() -> None:
    assert run("make_ready_and_end") == [(0, 1, True, True)] * 2


# two ranks on one device ----------------------------------------------------------------------------------------------


def compared(uuids: list[str]) -> list[str]:
    """What the check says in each of some ranks, in threads."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    found = [""] * len(uuids)

    def check(rank: int) -> None:
        try:
            accelerators.check_apart(torch.device("cuda", 0), rank, len(uuids), store)
        except MeshError as error:
            found[rank] = str(error)

    with pytest.MonkeyPatch.context() as patch:
        names = {f"rank-{rank}": uuid for rank, uuid in enumerate(uuids)}
        patch.setattr(
            accelerators, "identity", lambda device: ("machine", names[threading.current_thread().name], "node3")
        )
        threads = [threading.Thread(target=check, args=(k,), name=f"rank-{k}") for k in range(len(uuids))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def test_ranks_on_one_device_are_named() -> None:
    said = compared(["GPU-a", "GPU-b", "GPU-a"])
    assert len(set(said)) == 1
    assert said[0].startswith("ranks 0 and 2 compute on one device: GPU-a of host node3.")
    assert "UNIDIST_TORCH_TRANSPORT=gloo" in said[0]


def test_ranks_on_devices_of_their_own_are_not() -> None:
    assert compared(["GPU-a", "GPU-b", "GPU-c"]) == ["", "", ""]


def test_over_the_host_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(accelerators.TRANSPORT, "gloo")
    assert compared(["GPU-a", "GPU-a"]) == ["", ""]


def test_a_device_is_known_by_its_machine_and_number() -> None:
    with programs.cuda(2, uuid="17"):
        machine, name, _ = accelerators.identity(torch.device("cuda", 1))
    assert machine
    assert name == "GPU-17"


def test_processes_that_see_the_same_gpu_do_not_join() -> None:
    for said in run("with_one_gpu"):
        assert said.startswith("ranks 0 and 1 compute on one device: GPU-0000-0 of host ")


def test_over_the_host_they_do() -> None:
    found = run("with_one_gpu_over_the_host", UNIDIST_TORCH_TRANSPORT="gloo")
    assert found == [("cuda:0", ["gpu:0", "gpu:1"])] * 2


# over the host --------------------------------------------------------------------------------------------------------


def over_the_host() -> World:
    programs.nowhere_near()
    return laws_world(layout_pairs=12)


class TestOverTheHost(ConformanceSuite):
    """All collectives, on the way of tensors of a device that has no transport."""

    backend = "torch"
    world = f"{__name__}:over_the_host"
    processes = 2
    preload = preloaded.TORCH


def test_buffers_go_over_the_host() -> None:
    for rank, (flat, part, given, whole) in enumerate(run("move_buffers")):
        assert flat == [0.0, 1.5, 3.0, 4.5]
        assert part == [1.0, 3.0] if rank == 0 else [5.0, 7.0]
        assert given == [rank + k for k in range(4)]
        assert whole == [1.0, 1.0, 2.0, 2.0]


def test_ranks_that_disagree_over_nccl_are_told_over_gloo() -> None:
    for said, queued in run("disagree"):
        assert "broadcast(" in said
        assert "all_reduce(" in said
        assert queued == []


def test_programs_of_torch_do_not_go_over_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with programs.cuda(1):
        adapter: Any = unidist.use("torch")
        try:
            assert adapter.compiles
            monkeypatch.setenv(accelerators.TRANSPORT, "gloo")
            assert not adapter.compiles
        finally:
            unidist.shutdown()

"""Keras on torch computes on its rank's device, and what a step sends to a GPU does not wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import preloaded
from tests.visible import OF_KERAS
from unidist.keras.torch import devices
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes


def run(program: str, *args: Any, processes: int = 1, launcher: str | None = None, **environment: str) -> list[Any]:
    # Not forked from a server that has Keras: what Keras finds of CUDA when it is imported is made up here.
    with ProcessWorld(
        processes,
        launcher=launcher,
        env=environment,
        setup="tests.keras.torch.placing_keras:start",
        timeout=120,
        preload=preloaded.TORCH,
    ) as world:
        return world.call(f"tests.keras.torch.placing_keras:{program}", *args)


@pytest.mark.parametrize("keras_first", [True, False])
def test_keras_computes_on_the_gpu_of_its_rank(keras_first: bool) -> None:
    environment = {"UNIDIST_TORCH_TRANSPORT": "gloo"}  # there is no NCCL here
    found = run("places", "torch", keras_first, processes=2, launcher="torchrun", **environment)
    for rank, (where, _) in enumerate(found):
        assert where == ["cuda", f"cuda:{rank}", "cuda"]


@pytest.mark.parametrize(
    ("backend", "given", "keras_first"),
    [("sim", 2, True), ("horovod", None, False)],
)
def test_who_computes_on_cpus_does_so_beside_gpus(backend: str, given: Any, keras_first: bool) -> None:
    ((where, loss),) = run("places", backend, keras_first, given)
    assert where == ["cuda", "cpu", "cuda"]
    assert loss == pytest.approx(4.0)


def test_each_backend_says_where() -> None:
    assert run("places_of_two_backends") == [["cuda:0", "cpu", "cuda:0", "cpu"]]


def test_a_process_that_joins_by_an_address_moves_to_its_gpu() -> None:
    environment = {"UNIDIST_TORCH_TRANSPORT": "gloo"}
    found = run("place_after_joining", processes=2, launcher="torchrun", **environment)
    assert found == [["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]]


def test_groups_are_ready_before_anything_moves_in_them() -> None:
    for found in run("groups_of_a_step", 3, processes=2, launcher="torchrun"):
        ready: set[tuple[int, ...]] = set()
        for what, ranks in found:
            if what == "ready":
                ready.add(ranks)
            else:
                assert ranks in ready
        assert found[-1][0] == "moved"


def test_without_gpus_keras_stays_where_it_is_unless_cpus_are_named() -> None:
    assert run("place_without_gpus") == [("mps", "cpu")]


# what waits for a GPU -------------------------------------------------------------------------------------------------


def on_made_up_gpu(program: str, *args: Any) -> Any:
    preload = preloaded.KERAS["torch"]
    with ProcessWorld(1, launcher=None, env=OF_KERAS["torch"], timeout=120, preload=preload) as world:
        return world.call(f"tests.keras.torch.made_up_gpu:{program}", *args)[0]


@pytest.mark.parametrize("zero", [0, 1])
def test_nothing_in_a_warm_step_waits_or_mixes_devices(zero: int) -> None:
    assert on_made_up_gpu("step", zero) == []


def test_seeds_on_the_host_are_drawn_there() -> None:
    plain, found, kinds = on_made_up_gpu("seeds")
    assert found == plain
    assert kinds == {"cpu"}


def test_batches_are_sent_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4.0)
    sent: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: sent.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: sent.append((str(device), how)) or self)
    assert devices.sent(x, torch.device("cpu")) is x
    assert sent == []
    devices.sent(x, torch.device("cuda", 1))
    assert sent == ["pinned", ("cuda:1", {"non_blocking": True})]

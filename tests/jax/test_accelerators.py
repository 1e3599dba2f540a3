"""Accelerators as the jax backend sees them, on machines that have none: numbers, names, and a process's share."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from unidist.backends.environment import Launch
from unidist.backends.jax import devices, joining, virtual
from unidist.errors import MeshError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two GPUs, made up."""
    found = [SimpleNamespace(platform="gpu", id=k) for k in range(2)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: found)
    monkeypatch.setattr(jax, "devices", lambda kind=None: found)
    return found


def test_a_number_means_accelerators_where_there_are_any(gpus: list[Any]) -> None:
    assert devices.find(2) == tuple(gpus)


def test_another_number_than_there_are_is_refused(gpus: list[Any]) -> None:
    with pytest.raises(MeshError, match=r"this process has 2 devices of kind 'gpu'.*devices=\['cpu:0', ..., 'cpu:7'\]"):
        devices.find(8)


@pytest.mark.parametrize(
    ("names", "said", "made"),
    [
        (["cpu:0", "cpu:1", "cpu:2"], -1, [3]),
        (["cpu:0", "cpu:1"], 8, []),
        (["cpu:1", "cpu:0"], -1, []),
        (["cpu:0"], -1, []),
        (["gpu:0", "gpu:1"], -1, []),
    ],
)
def test_cpus_by_name_are_virtual(
    monkeypatch: pytest.MonkeyPatch, names: list[str], said: int, made: list[int]
) -> None:
    found: list[int] = []
    monkeypatch.setattr(devices, "config", SimpleNamespace(jax_num_cpu_devices=said))
    monkeypatch.setattr(devices, "make_virtual", found.append)
    monkeypatch.setenv("XLA_FLAGS", "")
    devices.make_named(names)
    assert found == made


@pytest.mark.parametrize(("count", "own"), [(1, None), (4, [2]), (None, [2])])
def test_a_task_alone_on_its_node_has_all_of_it(
    monkeypatch: pytest.MonkeyPatch, count: int | None, own: list[int] | None
) -> None:
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    launch = Launch(launcher="slurm", address="a:1", process_count=4, process_index=2, local_index=2, local_count=count)
    assert joining._local_devices(launch) == own


def test_the_simulator_looks_for_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    config = SimpleNamespace(
        jax_platforms=None, jax_num_cpu_devices=-1, update=lambda name, to: told.update({name: to})
    )
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config))
    virtual.prepare_devices(4)
    assert told == {"jax_platforms": "cpu", "jax_num_cpu_devices": 4}

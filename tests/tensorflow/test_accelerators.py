"""GPUs as the tensorflow backend sees them, on machines that have none: numbers, names, and a process's share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import preloaded
from tests.visible import OF_KERAS
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes
PROGRAMS = "tests.tensorflow.accelerators"


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessWorld]:
    preload = preloaded.KERAS["tensorflow"]
    with ProcessWorld(1, launcher=None, env=OF_KERAS["tensorflow"], timeout=120, preload=preload) as world:
        yield world


def test_a_process_takes_the_gpus_of_its_number_as_it_needs_them(process: ProcessWorld) -> None:
    (found,) = process.call(f"{PROGRAMS}:shares")
    every = [f"GPU:{k}" for k in range(4)]
    assert [seen for seen, _ in found] == [["GPU:2"], ["GPU:2", "GPU:3"], every, ["GPU:0"], ["GPU:3"]]
    assert all(grows for _, grows in found)


def test_a_process_without_gpus_of_its_own_is_told_so(process: ProcessWorld) -> None:
    (said,) = process.call(f"{PROGRAMS}:too_many")
    assert said.startswith("BackendNotAvailableError: process 2 of this host needs 1 of its GPUs, but 2 are visible")


def test_where_cpus_are_asked_for_gpus_are_hidden(process: ProcessWorld) -> None:
    (found,) = process.call(f"{PROGRAMS}:hidden")
    for left, said in (found[:2], found[2:]):
        assert left == []
        assert said.startswith("BackendMismatchError: ")
        assert "TensorFlow has started with its GPUs" in said


def test_a_number_means_gpus_where_there_are_any(process: ProcessWorld) -> None:
    ((names, said),) = process.call(f"{PROGRAMS}:counted")
    assert [name.rpartition("/")[2] for name in names] == ["device:GPU:0", "device:GPU:1"]
    assert said.startswith("MeshError: use('tensorflow', devices=8): this process has 2 GPUs")
    assert "devices=['cpu:0', ..., 'cpu:7']" in said


def test_cpus_by_name_are_virtual(process: ProcessWorld) -> None:
    assert process.call(f"{PROGRAMS}:named") == [["cpu:0", "cpu:1", "cpu:2"]]

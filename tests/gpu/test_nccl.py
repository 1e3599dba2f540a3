"""NCCL alone, in worlds of one: dtypes, handles, two groups at once, and what its errors become."""

from __future__ import annotations

import pytest

from tests.gpu.device import ENVIRONMENT, ON_GPU, process
from unidist.testing.processes import ProcessWorld

PROGRAMS = "tests.gpu.nccl"


def test_each_primitive_of_nccl_takes_each_dtype() -> None:
    with process() as found:
        assert found.call(f"{PROGRAMS}:call_nccl") == [[]]


def test_a_group_of_nccl_alone_gets_gloo_beside_it() -> None:
    with process() as found:
        assert found.call(f"{PROGRAMS}:join_a_group_of_nccl_alone") == [
            ("cpu:gloo,cuda:nccl" if ON_GPU else "cpu:gloo,cuda:gloo", 3.0)
        ]


def test_what_is_under_way_is_there_behind_its_wait() -> None:
    with process() as found:
        ((wrong, count),) = found.call(f"{PROGRAMS}:handles")
    assert wrong == []
    assert count > 40


def test_two_groups_are_under_way_at_once() -> None:
    with process() as found:
        ((wrong, count, own),) = found.call(f"{PROGRAMS}:two_groups")
    assert own
    assert count == 240
    assert wrong == 0


def test_a_mistake_in_arguments_is_no_loss() -> None:
    with process() as found:
        (raised,) = found.call(f"{PROGRAMS}:mistakes")
    assert [name for name, (kind, _) in raised.items() if not kind] == []
    assert [name for name, (_, is_loss) in raised.items() if is_loss] == []


@pytest.mark.skipif(not ON_GPU, reason="NCCL alone refuses two ranks on one GPU")
def test_two_ranks_on_one_gpu_are_no_loss() -> None:
    with ProcessWorld(2, env=ENVIRONMENT, timeout=120) as world:
        assert world.call(f"{PROGRAMS}:two_ranks_on_one_gpu") == [("DistBackendError", False)] * 2

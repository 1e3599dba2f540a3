"""gloo's threads interrupt no other when they wake, where a process computes in one thread."""

from __future__ import annotations

import numpy as np
import pytest

import unidist
from tests import preloaded
from tests.support.policies import threads
from unidist.testing.processes import ProcessWorld


def of_a_world_and_of_a_group() -> list[tuple[str, bool]]:
    """The mesh's axes are groups of their own."""
    unidist.use("torch")
    mesh = unidist.Mesh({"a": 2, "b": 2})
    whole = np.ones((2, 2), "float32")
    unidist.all_gather(unidist.distribute(whole, mesh, unidist.Layout("a", "b")), "b")
    return threads()


@pytest.mark.parametrize("count", ["1", "2"])
def test_those_that_carry_messages_and_no_others(count: str) -> None:
    env = {"OMP_NUM_THREADS": count}
    with ProcessWorld(4, setup=of_a_world_and_of_a_group, env=env, preload=preloaded.TORCH) as world:
        for (_, own), *others in world.call(threads):
            assert not own
            assert {late for name, late in others if name == "gloo_tcp_loop"} == {count == "1"}
            assert not any(late for name, late in others if name != "gloo_tcp_loop")

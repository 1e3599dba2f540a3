"""ConformanceSuite: an adapter's whole conformance test is one subclass.

# tests/test_mine.py
import unidist
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World

def world() -> World:
    return World(backend=unidist.use("mine", devices=8), numpy=..., vjp=...)

class TestMine(ConformanceSuite):
    backend = "mine"
    world = "test_mine:world"           # where this process holds all ranks

class TestMineInProcesses(ConformanceSuite):
    backend = "mine"
    world = "test_mine:world_of_processes"
    processes = 4                       # where each process holds its own: 4 are started, once for the class
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import pytest

from unidist.backends import registry
from unidist.errors import BackendNotAvailableError
from unidist.testing import laws
from unidist.testing.processes import ProcessWorld


class ConformanceSuite:
    """Every law of unidist.testing.laws as a test. Subclass it under a name that begins with Test.

    Attributes:
        backend: the registered name of the adapter under test.
        world: "module:function", importable in another process, that calls unidist.use(...), joins the world and gives
            a laws.World.
        differentiable: False leaves the laws of gradients out, for an adapter that declares so.
        left_out: names of further laws that another suite checks for this adapter.
        processes: 0 where the calling process holds all ranks; else how many to start.
        launcher: whose environment the processes see: as of ProcessWorld.
        env: further environment variables of the processes.
        timeout: seconds that a check may take.
        preload: what the processes find imported, as of ProcessWorld.
    """

    backend: ClassVar[str] = ""
    world: ClassVar[str] = ""
    differentiable: ClassVar[bool] = True
    left_out: ClassVar[frozenset[str]] = frozenset()
    processes: ClassVar[int] = 0
    launcher: ClassVar[str | None] = "torchrun"
    env: ClassVar[Mapping[str, str | None]] = {}
    timeout: ClassVar[float] = 120.0
    preload: ClassVar[Sequence[str]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls) -> Iterator[Callable[[str], None]]:
        """Runs a check by name: here, or in every process of a world that lives as long as the class."""
        if not cls.processes:
            with registry.isolated():
                world = laws.make_world(cls.world)
                yield lambda name: laws.run_check(name, world)
            return
        with contextlib.suppress(BackendNotAvailableError):
            registry.entry(cls.backend)  # the launcher that it has declared is known from here on
        started = ProcessWorld(
            cls.processes, launcher=cls.launcher, env=cls.env, timeout=cls.timeout, preload=cls.preload
        )
        with started as processes:
            yield lambda name: _run_in(processes, cls.world, name)
            if processes.pids:
                processes.call("unidist.testing.laws:leave_here")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "law" in metafunc.fixturenames:
            left_out = self.left_out | (frozenset() if self.differentiable else laws.NEED_GRADIENTS)
            metafunc.parametrize("law", [name for name in laws.CHECKS if name not in left_out])

    def test_law(self, run: Callable[[str], None], law: str) -> None:
        run(law)


def _run_in(processes: ProcessWorld, maker: str, name: str) -> None:
    processes.call("unidist.testing.laws:run_check_here", maker, name)

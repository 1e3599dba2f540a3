"""The simulator obeys the laws that every adapter obeys; and each law is broken by some adapter that does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import unidist
from tests.support.sampling import unless_all
from unidist import events
from unidist.algebra import Layout, Sharding, redistribution
from unidist.backends import registry
from unidist.backends.protocol import Capabilities
from unidist.backends.sim import reference
from unidist.backends.sim.backend import SimBackend
from unidist.testing import laws
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World
from unidist.testing.processes import ProcessFailedError, ProcessWorld


def bfloat16_too(value: np.ndarray, dtype: str) -> np.ndarray:
    return value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def six_devices() -> World:
    return World(backend=unidist.use("sim", devices=6), array=bfloat16_too, layout_pairs=unless_all(27, 120))


def eight_devices() -> World:
    return World(backend=unidist.use("sim", devices=8), array=bfloat16_too, layout_pairs=unless_all(14, 60))


class TestSixDevices(ConformanceSuite):
    backend = "sim"
    world = f"{__name__}:six_devices"
    differentiable = False


class TestEightDevices(ConformanceSuite):
    backend = "sim"
    world = f"{__name__}:eight_devices"
    differentiable = False


# The suite itself, on a simulator with the least of an autodiff, as a third party would use it ------------------------


class Taped(SimBackend):
    """Remembers the adjoint of what it did last."""

    capabilities: ClassVar[Capabilities] = replace(SimBackend.capabilities, differentiable=True)
    back: Callable[[Any], Any]

    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        self.back = lambda y: reference.run(redistribution(src, dst).adjoint, y)
        return super().redistribute(x, src, dst)

    def broadcast(self, x: Any, sharding: Sharding, axes: Any, root: int) -> Any:
        self.back = lambda y: reference.broadcast_adjoint(y, sharding, axes, root)
        return super().broadcast(x, sharding, axes, root)

    def permute(self, x: Any, sharding: Sharding, axes: Any, pairs: Any) -> Any:
        self.back = lambda y: reference.permute(y, sharding, axes, tuple((d, s) for s, d in pairs))
        return super().permute(x, sharding, axes, pairs)


def world_of(kind: type[Taped], devices: int = 6) -> World:
    unidist.register("taped", f"{__name__}:{kind.__name__}")
    backend = registry.use("taped", devices=devices)

    def vjp(function: Callable[[Any], Any], x: Any, y: Any) -> Any:
        function(x)
        return backend.back(y)  # type: ignore[attr-defined]

    return World(backend=backend, array=bfloat16_too, vjp=vjp, layout_pairs=unless_all(14, 60))


def taped() -> World:
    return world_of(Taped)


class TestTapedInProcesses(ConformanceSuite):
    backend = "taped"
    world = f"{__name__}:taped"
    processes = 2
    launcher = None


# Adapters that are wrong in one place, and the law that says so -------------------------------------------------------


class Replicates(Taped):
    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        return x


class GathersTheFirst(Taped):
    def gather(self, x: Any, sharding: Sharding) -> Any:
        return reference.gather(x, sharding) if not sharding.layout.partial else x[min(x)]


class SharesTheValue(Taped):
    def distribute(self, value: Any, sharding: Sharding) -> Any:
        if sharding.layout == Layout() and value.shape == sharding.shape:
            return dict.fromkeys(sharding.mesh.devices, value)
        return super().distribute(value, sharding)


class IgnoresTheDeviceOrder(Taped):
    def permute(self, x: Any, sharding: Sharding, axes: Any, pairs: Any) -> Any:
        out = super().permute(x, sharding, axes, pairs)
        return dict(zip(sorted(out), (out[r] for r in sharding.mesh.devices), strict=True))


class BroadcastsTheFirst(Taped):
    def broadcast(self, x: Any, sharding: Sharding, axes: Any, root: int) -> Any:
        return super().broadcast(x, sharding, axes, 0)


class WritesToItsInput(Taped):
    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        out = {rank: shard.copy() for rank, shard in super().redistribute(x, src, dst).items()}
        for shard in x.values():
            shard += 1
        return out


class WrongGradient(Taped):
    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        out = super().redistribute(x, src, dst)
        back = self.back
        self.back = lambda y: {rank: 2 * shard for rank, shard in back(y).items()}
        return out


class WidensHalves(Taped):
    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        out = super().redistribute(x, src, dst)
        if not redistribution(src, dst).collectives:
            return out
        return {r: s.astype("float32") if s.dtype == "float16" else s for r, s in out.items()}


class TakesEverything(Taped):
    capabilities = replace(Taped.capabilities, dtypes=frozenset({"float32"}))

    def _checked(self, value: Any) -> Any:
        return value


class SendsSilently(Taped):
    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        return reference.run(redistribution(src, dst), x)


class CountsTwice(Taped):
    def permute(self, x: Any, sharding: Sharding, axes: Any, pairs: Any) -> Any:
        events.emit(events.Event("permute", axes, (0,), 1, ""))  # type: ignore[arg-type]
        return super().permute(x, sharding, axes, pairs)


class ForgetsTheAxes(Taped):
    def mesh(self, mesh: Any) -> Any:
        return super().mesh(mesh).devices


class ForgetsTheMesh(Taped):
    def layout(self, sharding: Sharding) -> Any:
        return sharding.layout


class TakesAnyShape(Taped):
    def from_local(self, shards: Any, sharding: Sharding) -> Any:
        return dict(zip(sorted(sharding.mesh.devices), map(np.array, shards), strict=False))


class OneKindOfDevice(Taped):
    def list_devices(self, kind: str | None = None) -> list[str]:
        return super().list_devices()


class MaxIsSum(Taped):
    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        if any(op == "max" for _, op in src.layout.partial) and not dst.layout.partial:
            layout = Layout(*src.layout.dims, partial=src.layout.partial_axes, fanout=src.layout.fanout)
            return super().redistribute(x, src.with_layout(layout), dst)
        return super().redistribute(x, src, dst)


class LosesNans(Taped):
    def redistribute(self, x: Any, src: Sharding, dst: Sharding) -> Any:
        out = super().redistribute(x, src, dst)
        return {rank: np.nan_to_num(shard) for rank, shard in out.items()}


class LosesSigns(Taped):
    def broadcast(self, x: Any, sharding: Sharding, axes: Any, root: int) -> Any:
        return {rank: shard + np.float32(0) for rank, shard in super().broadcast(x, sharding, axes, root).items()}


class DeclaresTooMuch(Taped):
    capabilities = replace(Taped.capabilities, dtypes=frozenset({"complex64", "float32"}))


class BarrierFails(Taped):
    def barrier(self, mesh: Any = None, axes: Any = None) -> None:
        raise RuntimeError("no barrier here")


class SwapsTheGradientOfPermute(Taped):
    def permute(self, x: Any, sharding: Sharding, axes: Any, pairs: Any) -> Any:
        out = super().permute(x, sharding, axes, pairs)
        self.back = lambda y: reference.permute(y, sharding, axes, pairs)
        return out


WRONG: list[tuple[type[Taped], str]] = [
    (Replicates, "redistribute_even"),
    (Replicates, "redistribute_scalar"),
    (Replicates, "redistribute_empty"),
    (Replicates, "redistribute_uneven"),
    (Replicates, "redistribute_many_dims"),
    (Replicates, "collectives"),
    (Replicates, "arrays"),
    (GathersTheFirst, "from_local"),
    (SharesTheValue, "distribute"),
    (IgnoresTheDeviceOrder, "permute"),
    (BroadcastsTheFirst, "broadcast"),
    (WritesToItsInput, "redistribute_even"),
    (WrongGradient, "gradients"),
    (WidensHalves, "dtypes"),
    (TakesEverything, "dtypes_that_are_not_declared"),
    (SendsSilently, "ledger"),
    (CountsTwice, "ledger_of_broadcast_and_permute"),
    (ForgetsTheAxes, "meshes"),
    (ForgetsTheMesh, "meshes"),
    (TakesAnyShape, "errors"),
    (OneKindOfDevice, "devices"),
    (MaxIsSum, "reductions"),
    (LosesNans, "nans"),
    (LosesSigns, "signs_of_zero"),
    (DeclaresTooMuch, "protocol"),
    (BarrierFails, "barrier"),
    (SwapsTheGradientOfPermute, "gradients_of_broadcast_and_permute"),
]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.parametrize(("kind", "law"), WRONG, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_wrong_adapter_breaks_its_law(kind: type[Taped], law: str) -> None:
    with registry.isolated():
        world = world_of(kind)
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            laws.run_check(law, world)


def test_a_wrong_adapter_of_two_devices_breaks_the_law_of_dtypes() -> None:
    with registry.isolated(), pytest.raises(AssertionError, match="made float32 of float16"):
        laws.run_check("dtypes", world_of(WidensHalves, devices=2))


def test_every_law_is_broken_by_some_wrong_adapter() -> None:
    assert {law for _, law in WRONG} == set(laws.CHECKS)


def wrong_in_processes() -> World:
    return world_of(Replicates)


def test_a_broken_law_in_another_process_is_told_by_name() -> None:
    with (
        ProcessWorld(2, launcher=None, timeout=60) as processes,
        pytest.raises(ProcessFailedError, match=r"process \d of 2: AssertionError: redistribute by sum from Layout"),
    ):
        processes.call(laws.run_check_here, f"{__name__}:wrong_in_processes", "redistribute_even")


def test_a_suite_without_a_world_says_what_it_needs() -> None:
    with pytest.raises(TypeError, match=r"must give a unidist\.testing\.laws\.World, found dict"):
        laws.make_world("builtins:dict")

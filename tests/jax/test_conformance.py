"""The jax backend obeys the laws: eight virtual devices in one process, and two processes with two each.

All of it runs in processes of its own: JAX counts its devices once, before XLA starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unidist
from tests import preloaded
from tests.support.sampling import unless_all
from tests.visible import QUICK_JAX
from unidist.algebra import Sharding
from unidist.backends.protocol import Array
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World

# The programs are the same whether their devices are in one process or in two: those of eight are differentiated.
OF_ONE_PROCESS = frozenset(
    [
        *("dtypes", "gradients", "gradients_of_broadcast_and_permute", "redistribute_empty", "redistribute_scalar"),
        *("redistribute_many_dims", "reductions", "ledger_of_broadcast_and_permute"),
    ]
)
# Of 64 bits, or of groups of three: what is not looked at again.
AS_OF_EIGHT = frozenset(
    [
        *("gradients_of_broadcast_and_permute", "redistribute_empty", "redistribute_scalar", "redistribute_many_dims"),
        *("ledger", "ledger_of_broadcast_and_permute"),
    ]
)


@dataclass(frozen=True, kw_only=True)
class JaxWorld(World):
    """A World that remembers the shardings of what it placed: the form of JAX's cotangents follows from them."""

    placed: dict[int, tuple[Any, Sharding]] = field(default_factory=dict)

    def place(self, shards: Mapping[int, Array], sharding: Sharding, dtype: str | None = None) -> Any:
        x = super().place(shards, sharding, dtype)
        while len(self.placed) > 8:
            del self.placed[next(iter(self.placed))]
        self.placed[id(x)] = x, sharding
        return x

    def sharding_of(self, x: Any) -> Sharding:
        return self.placed[id(x)][1]


def _world(backend: Any, layout_pairs: int) -> World:
    def vjp(function: Callable[[Any], Any], x: Any, y: Any) -> Any:
        there, back = world.sharding_of(x), world.sharding_of(y)
        _, pull = jax.vjp(function, x)
        (cotangent,) = pull(backend.cotangent(y, back.with_layout(back.layout.dual())))
        return backend.gradient(cotangent, there)

    world = JaxWorld(
        backend=backend,
        array=lambda v, dtype: jnp.asarray(v, dtype),
        numpy=_numpy,
        vjp=vjp,
        layout_pairs=layout_pairs,
        layouts=unless_all(2, None),
    )
    return world


def _numpy(x: Any) -> Array:
    return np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x)


def eight_devices() -> World:
    return _world(unidist.use("jax", devices=8), unless_all(2, 12))


def six_wide_devices() -> World:
    jax.config.update("jax_enable_x64", True)
    return _world(unidist.use("jax", devices=6), unless_all(2, 6))


def two_devices_each() -> World:
    return _world(unidist.use("jax", devices=2), unless_all(2, 6))


@pytest.mark.slow
class TestEightDevices(ConformanceSuite):
    backend = "jax"
    world = f"{__name__}:eight_devices"
    processes = 1
    preload = preloaded.JAX
    launcher = None
    env = QUICK_JAX  # every pair of layouts is a program of its own: compiling takes all the time
    timeout = 280.0


@pytest.mark.slow
class TestSixDevicesOf64Bits(ConformanceSuite):
    backend = "jax"
    world = f"{__name__}:six_wide_devices"
    processes = 1
    left_out = unless_all(AS_OF_EIGHT, frozenset())
    preload = preloaded.JAX
    launcher = None
    env = QUICK_JAX  # every pair of layouts is a program of its own: compiling takes all the time
    timeout = 280.0


@pytest.mark.slow
@pytest.mark.processes
class TestTwoProcesses(ConformanceSuite):
    backend = "jax"
    world = f"{__name__}:two_devices_each"
    processes = 2
    left_out = unless_all(OF_ONE_PROCESS, frozenset())
    preload = preloaded.JAX
    launcher = "jax"
    env = QUICK_JAX  # every pair of layouts is a program of its own: compiling takes all the time
    timeout = 280.0

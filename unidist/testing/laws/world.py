"""World: a backend and what the checks need of its framework; and how they compare with NumPy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from unidist.algebra import Sharding
from unidist.algebra.layout import ReduceOp
from unidist.backends import registry
from unidist.backends.protocol import Array, DistributionBackend
from unidist.backends.sim import reference
from unidist.errors import UnidistError
from unidist.testing import samples

Check = Callable[["World"], None]
CHECKS: dict[str, Check] = {}
NEED_GRADIENTS = frozenset({"gradients", "gradients_of_broadcast_and_permute"})
# Relative error by which a mean of three may differ from NumPy's, in a dtype; all other values are exact.
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2}


def _native(value: Array, dtype: str) -> Any:
    return value.astype(dtype)


@dataclass(frozen=True, kw_only=True)
class World:
    """A backend in use and what the checks need of its framework.

    unidist.use was called, and the world joined.

    Attributes:
        backend: the backend in use.
        array: (NumPy array, dtype name) -> native array of that dtype; by default NumPy's astype.
        numpy: native array -> NumPy array of the same values.
        vjp: (function, x, y) -> the gradient at x of <function(x), y>, by the framework's own autodiff. x and y are the
            adapter's data, y and the result at the duals of the layouts of function(x) and x. None where the
            framework has none; capabilities.differentiable says so too.
        layout_pairs: how many pairs of layouts are tried on each mesh and shape; 729 are all of two axes and dims.
        layouts: how many layouts are tried on each mesh and shape where there is no second one, and of the five kinds
            of permutations, and others on the next ones; 27 are all of two axes and dims. None: all.
    """

    backend: DistributionBackend
    array: Callable[[Array, str], Any] = _native
    numpy: Callable[[Any], Array] = np.asarray
    vjp: Callable[[Callable[[Any], Any], Any, Any], Any] | None = None
    layout_pairs: int = 60
    layouts: int | None = None

    @property
    def size(self) -> int:
        return len(self.backend.list_devices())

    @property
    def dtype(self) -> str:
        return "float32"

    def place(self, shards: Mapping[int, Array], sharding: Sharding, dtype: str | None = None) -> Any:
        """The adapter's data of the given shards."""
        native = [self.array(shards[rank], dtype or self.dtype) for rank in self.backend.local_ranks()]
        return self.backend.from_local(native, sharding)

    def held(self, x: Any, sharding: Sharding) -> dict[int, Array]:
        return {rank: self.numpy(shard) for rank, shard in self.backend.to_local(x, sharding).items()}


def run_check(name: str, world: World) -> None:
    CHECKS[name](world)


def make_world(maker: str) -> World:
    """Returns what "module:function" gives; raises TypeError if it is no World."""
    module, _, function = maker.partition(":")
    world = getattr(importlib.import_module(module), function)()
    if not isinstance(world, World):
        raise TypeError(f"{maker} must give a unidist.testing.laws.World, found {type(world).__name__}")
    return world


_made = cache(make_world)


def run_check_here(maker: str, name: str) -> None:
    """Runs a check in this process on the World that "module:function" gives; it is made once a process."""
    run_check(name, _made(maker))


def leave_here() -> None:
    """Leaves the world that this process joined."""
    if registry.has_current():
        registry.shutdown()


def law(check: Check) -> Check:
    """Enters a check into CHECKS under its name without "check_"."""

    CHECKS[check.__name__.removeprefix("check_")] = check
    return check


# Comparing


def same(found: Any, wanted: Any, what: str, *, dtype: str = "float32") -> None:
    """Raises AssertionError where shapes differ, or values by more than the dtype's tolerance."""
    left, right = np.asarray(found), np.asarray(wanted)
    assert left.shape == right.shape, f"{what}: shape {left.shape}, expected {right.shape}"
    tolerance = TOLERANCE.get(dtype, 1e-6)
    np.testing.assert_allclose(
        left.astype(np.float64), right.astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=what
    )


def holds(world: World, x: Any, sharding: Sharding, wanted: Mapping[int, Array], what: str, **kind: str) -> None:
    """Raises AssertionError where x is not the wanted shards."""
    where = f"{what}: {sharding.layout} of shape {sharding.shape} on {sharding.mesh}"
    found = world.held(x, sharding)
    assert set(found) == set(world.backend.local_ranks()), f"{where}: ranks {sorted(found)}"
    exact = world.backend.capabilities.view == "local" or not sharding.layout.partial
    for rank, shard in found.items():
        assert shard.shape == sharding.local_shape(rank), f"{where}: rank {rank} holds shape {shard.shape}"
        if exact:
            same(shard, wanted[rank], f"{where}: rank {rank}", **kind)
    if not exact:
        same(world.backend.gather(x, sharding), reference.gather(wanted, sharding), f"{where}: gathered", **kind)


def raises(kind: type[UnidistError], words: str, call: Callable[[], Any]) -> None:
    """Raises AssertionError unless the call raises such an error whose text has every one of the words."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"nothing raised {kind.__name__} (about: {words})")
    missing = [word for word in words.split() if word not in text]
    assert not missing, f"the {kind.__name__} should name {missing}: {text}"


def layouts(world: World, shapes: Sequence[tuple[int, ...]]) -> Iterator[Sharding]:
    """Over every mesh and shape, every layout; or as many of them as the world tries, in turns."""
    turn = 0
    for mesh in samples.meshes(world.size):
        for shape in shapes:
            kinds = list(samples.layouts(mesh.axis_names, len(shape)))
            count = min(world.layouts or len(kinds), len(kinds))
            for k in range(turn, turn + count):
                yield Sharding(mesh, kinds[k % len(kinds)], shape)
            turn += count


def cases(world: World, shapes: Sequence[tuple[int, ...]], *, op: ReduceOp = "sum") -> Iterator[tuple[Any, ...]]:
    """(src, dst, rng) over every mesh and shape; every layout comes as source and as target."""
    rng = np.random.default_rng(7)
    for mesh in samples.meshes(world.size):
        for shape in shapes:
            kinds = list(samples.layouts(mesh.axis_names, len(shape), op=op))
            for src, dst in samples.pairs(kinds, min(world.layout_pairs, len(kinds) ** 2), rng):
                yield Sharding(mesh, src, shape), Sharding(mesh, dst, shape), rng


def shapes(world: World) -> list[tuple[int, ...]]:
    n = world.size
    return [(2 * n, n), (2 * n + 1, 5), (1, n - 1), (0, 3), (n + 1,), ()]

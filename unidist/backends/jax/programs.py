"""The compiled programs of a world's collectives: each is made once, and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax

from unidist.algebra import Mesh, Sharding
from unidist.backends.jax import arrays, collectives, waiting
from unidist.backends.jax.collectives import Move

_KEPT = 16384
# The programs on one sharding, by their names.
_MAKERS: dict[str, Callable[..., Move]] = {
    "broadcast": collectives.broadcasting,
    "permute": collectives.permutation,
    "gradient": collectives.as_gradient,
    "cotangent": collectives.as_cotangent,
}


class Redistribution:
    """A program, the shape of the data that it takes, and the program for what is whole everywhere.

    The last one's dispatch does not wait for other processes.
    """

    __slots__ = ("program", "shape", "unhurried")

    def __init__(self, shape: tuple[int, ...], program: Move) -> None:
        self.shape = shape
        self.program = program
        self.unhurried: Move = jax.jit(lambda x: waiting.unhurried(program(x)))


class Programs:
    """The compiled programs of one world.

    Args:
        native: gives JAX's mesh of a mesh.
    """

    def __init__(self, native: Callable[[Mesh], jax.sharding.Mesh]) -> None:
        self._native = native
        self.redistribution = lru_cache(maxsize=_KEPT)(self._make_redistribution)
        self.on_shards = lru_cache(maxsize=_KEPT)(self._make_on_shards)

    def _make_redistribution(self, src: Sharding, dst: Sharding) -> Redistribution:
        program = collectives.program_of(self._native(src.mesh), src, dst)
        return Redistribution(arrays.data_shape(src), program)

    def _make_on_shards(self, name: str, sharding: Sharding, *how: Any) -> Move:
        return _MAKERS[name](self._native(sharding.mesh), sharding, *how)

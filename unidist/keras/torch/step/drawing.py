"""Random numbers that a step draws from the process's generators: Python's, NumPy's, torch's, Keras's.

What such a step draws is whole: each rank draws all of it. So the generators must stand alike.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unidist import events
from unidist.errors import DesyncError
from unidist.keras.patching.compat import tree
from unidist.keras.torch import context
from unidist.keras.torch.cutting import of_places
from unidist.keras.torch.params.placing import is_placed
from unidist.keras.torch.world import RankWorld, keras_generator


@dataclass(frozen=True)
class Generators:
    """Says how far the generators of this process have come."""

    of_python: Any
    of_numpy: Any
    of_torch: torch.Tensor
    of_cuda: torch.Tensor | None
    of_keras: torch.Tensor | None

    @staticmethod
    def now(of_keras: Any = None) -> Generators:
        seed = None if of_keras is None else of_keras.state.value.detach().clone()
        of_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return Generators(random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), of_cuda, seed)

    def go_on(self, of_keras: Any = None) -> None:
        """From here."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)
        if self.of_cuda is not None:
            torch.cuda.set_rng_state(self.of_cuda)
        if of_keras is not None:
            of_keras.state.assign(self.of_keras)

    def digest(self) -> int:
        _, drawn, gauss = self.of_python
        tensors = [x for x in (self.of_torch, self.of_cuda, self.of_keras) if x is not None]
        arrays = [np.array(drawn, np.int64), *(x.cpu().numpy() for x in tensors)]
        texts = [repr(gauss)]
        for leaf in tree.flatten(self.of_numpy):
            if isinstance(leaf, np.ndarray):
                arrays.append(leaf)
            else:
                texts.append(repr(leaf))
        return zlib.crc32(b"".join([*(array.tobytes() for array in arrays), *(text.encode() for text in texts)]))


@contextlib.contextmanager
def alike(world: RankWorld, may_draw: bool) -> Iterator[None]:
    """Lets a step inside draw alike on all ranks.

    In the simulator each rank has generators of its own, which begin alike.

    Raises:
        DesyncError: it has drawn, and the generators of the processes had come apart before.
    """
    if not may_draw or world.mesh.size == 1 or context.frame() is not None:
        yield
    elif world.runs_several:
        with _each_its_own(world):
            yield
    else:
        before = Generators.now(keras_generator()).digest()
        yield
        if Generators.now(keras_generator()).digest() != before:
            _check(world, before)


@contextlib.contextmanager
def _each_its_own(world: RankWorld) -> Iterator[None]:
    shown = first = world.ranks[0]
    # Asked for here: at its first turn a rank's thread still has Keras's state of another run.
    generator = keras_generator()
    if generator is not None and is_placed(generator.state):
        generator = None  # of which each rank has a value of its own
    held = dict.fromkeys(world.ranks, Generators.now(generator))

    def turn(rank: int) -> None:
        nonlocal shown
        if rank != shown and rank in held:
            held[shown] = Generators.now(generator)
            held[rank].go_on(generator)
            shown = rank

    try:
        with world.backend.calling_at_turns(turn):
            yield
    finally:
        turn(first)


def _check(world: RankWorld, digest: int) -> None:
    found = of_places(world, world.mesh.axis_names, digest, "agreement")
    if len(set(found)) > 1:
        raise DesyncError(
            "the generators that a step draws from differ between the processes. Draw from a "
            "keras.random.SeedGenerator that the model has, and give random rows as data",
            ranks=world.mesh.devices,
            collective=events.purpose() or "agreement",
        )

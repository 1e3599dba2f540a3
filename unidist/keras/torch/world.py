"""RankWorld: the ranks of this process, how to run something on each, and their local-view backend."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from unidist import session
from unidist.algebra import Axes, Layout, Mesh, Sharding
from unidist.backends import registry
from unidist.backends.local import LocalViewBackend
from unidist.errors import BackendMismatchError, CapabilityError
from unidist.keras.patching.compat import GLOBAL_SEED_GENERATOR, global_seed_generator, global_state
from unidist.keras.torch import context, outside
from unidist.keras.torch.context import Frame

T = TypeVar("T")

# Another object each time that the worlds of before are left.
_left = object()


class RankWorld:
    """The ranks of one mesh that live in this process.

    A process of torch.distributed holds one rank and runs it where it is called. The simulator holds all ranks and
    runs each in its own thread; outside of `run` its main thread sees whole values.
    """

    def __init__(self, mesh: Mesh, backend: LocalViewBackend[torch.Tensor], data_axes: Axes) -> None:
        self.mesh = mesh
        self.backend = backend
        self.data_axes = data_axes
        self.data_shards = mesh.axis_size(data_axes)
        self._until = _left
        self.choices = 0  # how often a variable was said to train, or not to
        self.is_virtual = backend.is_virtual
        self.rehearses = not backend.carries_values  # what a step would send is asked for (rehearsal.py)
        self.spaces: dict[tuple[int, Axes], Any] = {}  # by rank and axes, once it has had carriers
        self._data_places: dict[int, int] = {}
        self.ranks: tuple[int, ...] = tuple(sorted(mesh.devices)) if self.is_virtual else (backend.rank,)

    @property
    def runs_several(self) -> bool:
        """Is true where ranks are run here beside a program that is none of them."""
        return self.is_virtual and self.mesh.size > 1

    @property
    def cuts_rows(self) -> bool:
        """Is true where there are several data shards."""
        return self.data_shards > 1

    @property
    def writes(self) -> bool:
        """Is true where this process writes files and talks to the terminal."""
        return self.is_virtual or self.backend.process_index() == 0

    def data_place(self, rank: int) -> int:
        """The place of a rank among the data shards."""
        found = self._data_places.get(rank)
        if found is None:
            found = self._data_places[rank] = self.mesh.group(self.data_axes, rank).index
        return found

    def seed_place(self, rank: int, axes: Axes) -> int:
        """Returns a rank's place for random numbers on activations that `axes` cut as well.

        It is none of a data shard's own.
        """
        return self.data_shards + self.mesh.group((*self.data_axes, *axes), rank).index

    @functools.cached_property
    def rounds_alike(self) -> bool:
        """Is true where ranks that compute the same get the same bits.

        Kernels of GPUs may add up in any order (atomics).
        """
        return torch.device(self.backend.torch_device() or "cpu").type == "cpu"

    @functools.cached_property
    def drifting(self) -> Axes:
        """The axes of models, where ranks that compute the same may get other last bits."""
        return self._drifting_beside(self.data_axes)

    def _drifting_beside(self, axes: Axes) -> Axes:
        if self.rounds_alike:
            return ()
        return tuple(a for a in self.mesh.axis_names if a not in axes and self.mesh.axis_size(a) > 1)

    def is_first(self, rank: int, axes: Axes) -> bool:
        """Returns whether a rank is the first of those that differ along the axes."""
        return self.mesh.group(axes, rank).index == 0

    def frame_for(self, rank: int) -> Frame:
        return Frame(rank, self, seed_place=self.data_place(rank))

    def run(self, work: Callable[[Frame], T]) -> T:
        """work(frame) on every rank of this process; the first rank's result.

        Inside a frame (a step that calls a step) it runs for that rank alone.
        """
        inside = context.frame()
        if inside is not None:
            return work(inside)
        self.check()
        if not self.is_virtual:
            with context.entered(self.frame_for(self.ranks[0])) as frame:
                return work(frame)
        state, before = keras_state(), keras_generator()
        made: dict[int, Any] = {}

        def on_rank(rank: int) -> T | None:
            if rank not in self.ranks:
                return None
            restore_keras_state(state)
            with context.entered(self.frame_for(rank)) as frame:
                found = work(frame)
            made[rank] = keras_generator()
            return found

        with outside.ranks_running():
            results = self.backend.run(on_rank)
        if before is None and made[self.ranks[0]] is not None:
            _adopt(made[self.ranks[0]])
        return results[self.ranks[0]]  # type: ignore[return-value]

    def check_trainable(self, path: str) -> None:
        """Lets a variable become trainable whose gradient nobody reduces.

        Whoever trains looks again before a step.

        Raises:
            CapabilityError: a step is under way.
        """
        if context.frame() is not None:
            raise CapabilityError(
                f"variable {path!r} was not trainable when this training began, and becomes so amid a step: set "
                "trainable=True on its layer before fit, or in a callback"
            )

    def of_no_model(self, path: str) -> CapabilityError:
        """The error of a step that reads or trains a variable of which nobody knows."""
        return CapabilityError(
            f"a step uses variable {path!r}, which no model has that trains or has trained: make what has it an "
            "attribute of the model that trains before fit (a Sequential that is built takes none), or fit it before"
        )

    def check(self) -> None:
        """Checks that the world is still there.

        Raises:
            BackendMismatchError: `unidist.shutdown` has left this world.
        """
        if self._until is not _left:
            raise BackendMismatchError(
                "this model is distributed over a world that unidist.shutdown() has left. Before it, save the model or "
                "take unidist.gather_weights(model); after it, load them into a model made under a new strategy"
            )

    # what a rank asks of its data group ---------------------------------------------------------------------------

    def sum_over(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        """The sum over axes of a tensor that needs no gradient."""
        partial = Sharding(self.mesh, Layout(partial=axes), tuple(x.shape))
        with torch.no_grad():
            return self.backend.redistribute(x.detach(), partial, partial.with_layout(Layout()))

    def summed(self, tensors: Sequence[torch.Tensor], axes: Axes) -> list[torch.Tensor]:
        """The sums over axes of tensors that need no gradient, by one all_reduce for each dtype."""
        out = [x.detach() for x in tensors]
        for dtype in dict.fromkeys(x.dtype for x in out):
            alike = [k for k, x in enumerate(out) if x.dtype == dtype]
            total = self.sum_over(torch.cat([out[k].reshape(-1) for k in alike]), axes)
            for k, part in zip(alike, total.split([out[k].numel() for k in alike]), strict=True):
                out[k] = part.view(out[k].shape)
        return out

    def agreed(self, frame: Frame, tensors: Sequence[torch.Tensor], axes: Axes) -> list[torch.Tensor]:
        """The sums over axes, the same bits on all ranks: along those that drift the first one's."""
        if drifting := self._drifting_beside(axes):
            axes = (*axes, *drifting)
            if not self.is_first(frame.rank, drifting):
                tensors = [torch.zeros_like(x) for x in tensors]
        return self.summed(tensors, axes) if axes else list(tensors)

    def of_shards(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns each tensor of all data shards, stacked and fanned out: gradients come back summed.

        All have one shape: one all_gather.
        """
        own = torch.stack(tuple(tensors))[None]
        cut = Sharding(self.mesh, Layout(self.data_axes), (self.data_shards, *own.shape[1:]))
        return self.backend.redistribute(own, cut, cut.with_layout(Layout(fanout=self.data_axes))).unbind(1)


def keras_generator() -> Any:
    """Returns what serves random numbers without a seed in this thread; None until some are drawn."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


def _adopt(generator: Any) -> None:
    """Gives the program the generator that a rank has made. Making another draws from Python's own."""
    drawn = random.getstate()
    global_seed_generator().state.assign(generator.state.value.detach())
    random.setstate(drawn)


def keras_state() -> dict[str, Any]:
    """Keras's thread-local state (distribution, dtype policy, device...), to be copied into rank threads."""
    return dict(global_state.GLOBAL_STATE_TRACKER.__dict__)


def restore_keras_state(state: dict[str, Any]) -> None:
    own = global_state.GLOBAL_STATE_TRACKER.__dict__
    own.clear()
    # Containers are copied: ranks that take turns must not push and pop on one stack.
    own.update({k: copy.copy(v) if isinstance(v, list | dict | set) else v for k, v in state.items()})


def leave_worlds() -> None:
    """Models that are distributed over those of before raise where they would send or compute."""
    global _left
    _left = object()
    _world_of.cache_clear()


def rank_world(mesh: Mesh, data_axes: Axes) -> RankWorld:
    """The RankWorld of a mesh on the backend in use. Cached by the whole mesh.

    Raises:
        CapabilityError: the backend in use cannot run Keras on torch.
    """
    backend: Any = session.backend()
    return _world_of(backend, mesh, data_axes)


@lru_cache(maxsize=64)
def _world_of(backend: Any, mesh: Mesh, data_axes: Axes) -> RankWorld:
    backend.mesh(mesh)
    if registry.in_use().virtual:
        return RankWorld(mesh, virtual_ranks(len(backend.list_devices())), data_axes)
    if not isinstance(backend, LocalViewBackend):
        raise CapabilityError(f"backend {backend.name!r} cannot train Keras models on torch: use 'torch' or 'sim'")
    return RankWorld(mesh, backend, data_axes)


@lru_cache(maxsize=8)
def virtual_ranks(count: int) -> LocalViewBackend[torch.Tensor]:
    """The simulator's ranks for torch tensors, one set for each number of devices."""
    from unidist.backends.sim.ranks import VirtualRanks
    from unidist.backends.sim.world import VirtualWorld

    return VirtualRanks(VirtualWorld(count))

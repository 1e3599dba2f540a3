"""Storage: where a variable's value, its gradient and its slots are, on each rank of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from unidist import events
from unidist.algebra import Axes, Layout, Mesh, Sharding
from unidist.keras.torch import context, outside
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params import collective_traversal, sharded_norms
from unidist.keras.torch.params.compute_dtype import LowValue, without_memory
from unidist.keras.torch.params.flat_buffer import is_nested
from unidist.keras.torch.world import RankWorld
from unidist.strategies import VariableLayouts

if TYPE_CHECKING:
    from unidist.keras.torch.params.param_group import Unit


@dataclass(frozen=True, slots=True)
class Shardings:
    """The shardings of one variable: the strategy's three layouts.

    Attributes:
        stored: where the value rests.
        held: what a layer needs of it: as ruled, and whole over the data axes.
        state: where its gradient is reduced to and its slots live.
    """

    stored: Sharding
    held: Sharding
    state: Sharding

    @property
    def layouts(self) -> VariableLayouts:
        return VariableLayouts(self.stored.layout, self.held.layout, self.state.layout)

    @staticmethod
    def alike(sharding: Sharding) -> Shardings:
        """One layout for everything."""
        return Shardings(sharding, sharding, sharding)

    @staticmethod
    def by(layouts: VariableLayouts, mesh: Mesh, shape: tuple[int, ...]) -> Shardings:
        stored = Sharding(mesh, layouts.storage, shape)
        held = stored.with_layout(layouts.compute.with_axis(layouts.compute.fanout, "I"))
        state = stored.with_layout(layouts.state)
        # A rule may cut a dim by a data axis before a model axis, or two dims by data axes: layers see such a shard as
        # it is, and gather it whole.
        return Shardings(stored, held if is_nested(held, stored) and is_nested(held, state) else stored, state)


class Storage:
    """Keeps a variable in three parameters for each rank; some or all may be one:

    - shards: the stored value,
    - leaves: what layers compute with, whole over the data axes, where gradients arrive,
    - states: what optimizers see: a part of the stored value (of the same memory), with the reduced gradient.

    Attributes:
        is_sharded: whether layers see a shard.
        is_whole: whether layers see the whole value on every rank.
        is_kept: whether what layers compute with is what is stored.
        is_overwritten: whether its gradient is its next value.
        of_program: what the simulator's program has of it; None until it is asked for.
        units: what gathers it, by rank. lows: its gathered value in the dtype of computation, where it has one.
    """

    def __init__(self, world: RankWorld, shardings: Shardings, path: str) -> None:
        self.world = world
        self.shardings = shardings
        self.path = path
        self.watchers = 0  # of whose gradients it is one
        self.shards: dict[int, torch.nn.Parameter] = {}
        self.leaves: dict[int, torch.nn.Parameter] = {}
        self.states: dict[int, torch.nn.Parameter] = {}
        self.units: dict[int, Unit] = {}
        self.lows: dict[int, LowValue] = {}
        self.of_program: outside.Outside | None = None
        sharded_norms.watch(self)
        held = shardings.held.layout
        self.is_sharded = bool(held.dims)
        self.is_whole = not held.dims and not held.partial
        self.is_kept = shardings.stored == shardings.held
        self.is_overwritten = False

    @property
    def sharding(self) -> Sharding:
        """Returns how layers see it."""
        return self.shardings.held

    @property
    def layout(self) -> Layout:
        return self.shardings.held.layout

    @property
    def is_replica(self) -> bool:
        """Is true where each rank stores something of the whole shape: the value, or its part of a sum."""
        return not self.shardings.stored.layout.dims

    @property
    def is_cut(self) -> bool:
        """Is true where each rank stores a part of the value."""
        return bool(self.shardings.stored.layout.dims) and not self.shardings.stored.layout.partial

    def is_others(self, frame: Frame) -> bool:
        """Returns whether it is a sum over data shards, and another rank adds to it what all ranks know."""
        axes = tuple(axis for axis, op in self.shardings.stored.layout.partial if op == "sum")
        return bool(axes) and not self.world.is_first(frame.rank, axes)

    @property
    def is_seen_by_loops(self) -> bool:
        """Is true where a loop of the user's own sees a `Value`: a gradient is here, or may come."""
        if self.world.is_virtual or not self.shardings.state.layout.dims:
            return False
        may_ask = self.is_cut and self.own(None).requires_grad and torch.is_grad_enabled()
        return may_ask or self.own(None).grad is not None

    @property
    def summed_axes(self) -> Axes:
        """The axes over which its gradient arrives partial: of other rows on each rank."""
        return self._whole_over(self.world.data_axes)

    @property
    def drifting_axes(self) -> Axes:
        """The axes over which its gradient arrives whole, with other last bits."""
        return self._whole_over(self.world.drifting)

    def _whole_over(self, axes: Axes) -> Axes:
        return tuple(a for a in axes if self.layout.state(a) == "I" and self.world.mesh.axis_size(a) > 1)

    # values -------------------------------------------------------------------------------------------------------

    def fill(self, value: torch.Tensor, *, trainable: bool) -> None:
        """Makes each rank's shard of a whole value; no shard shares memory with it."""
        for rank in self.world.ranks:
            shard = self._shard_of(value, rank).clone(memory_format=torch.contiguous_format)
            self._take(rank, torch.nn.Parameter(shard, requires_grad=trainable and shard.is_floating_point()))

    def keep(self, parameter: torch.nn.Parameter) -> None:
        """Takes a parameter as it is: torch modules that share it keep it."""
        self._take(self.world.ranks[0], parameter)

    @contextlib.contextmanager
    def standing_in(self, rank: int, value: torch.Tensor) -> Iterator[torch.nn.Parameter]:
        """Inside, a rank's shard is a parameter with this memory, which it gives, and nothing gathers it."""
        before = self.shards, self.leaves, self.states, self.units, self.lows
        self.shards, self.leaves, self.states, self.units, self.lows = *map(dict, before[:3]), {}, {}
        try:
            self._take(rank, torch.nn.Parameter(value, requires_grad=self.shards[rank].requires_grad), torch.empty)
            yield self.shards[rank]
        finally:
            self.shards, self.leaves, self.states, self.units, self.lows = before

    def _take(self, rank: int, shard: torch.nn.Parameter, made: Callable[..., torch.Tensor] = without_memory) -> None:
        stored, held, state = self.shardings.stored, self.shardings.held, self.shardings.state
        self.shards[rank] = self.leaves[rank] = self.states[rank] = shard
        if state != stored:
            pairs = zip(state.region(rank), stored.region(rank), strict=True)
            own = tuple(slice(lo - at, lo - at + n) for (lo, n), (at, _) in pairs)
            self.states[rank] = torch.nn.Parameter(shard.detach()[own], requires_grad=shard.requires_grad)
        if held != stored:
            leaf = made(held.local_shape(rank), dtype=shard.dtype, device=shard.device)
            self.leaves[rank] = torch.nn.Parameter(leaf, requires_grad=shard.requires_grad)

    def as_stored(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        """Returns what is stored of a tensor; a rank has the part that optimizers see. A collective."""
        stored, state = self.shardings.stored, self.shardings.state
        with events.for_purpose("agreement"):
            return part if state == stored else self.world.backend.redistribute(part, state, stored)

    def set_trainable(self, trainable: bool) -> None:
        for parameter in self.parameters():
            parameter.requires_grad = trainable and parameter.is_floating_point()

    def parameters(self) -> list[torch.nn.Parameter]:
        """All that torch may see of it."""
        seen = [self.of_program.parameter] if self.of_program is not None else []
        return [*self.shards.values(), *self.leaves.values(), *self.states.values(), *seen]

    def forget_gradients(self, rank: int) -> None:
        outside.reach(self)
        self.shards[rank].grad = self.leaves[rank].grad = self.states[rank].grad = None

    def assign(self, value: torch.Tensor) -> None:
        """Writes a whole value into each rank's shard (of the rank at work alone, in a frame)."""
        outside.reach(self)
        frame = context.frame()
        with torch.no_grad():
            for rank in self.world.ranks if frame is None else (frame.rank,):
                units = self.gathered_by(rank)
                for unit in units:
                    unit.finish()
                self.shards[rank].copy_(self._shard_of(value, rank))
                for unit in [] if self.is_kept else units:
                    unit.write(self, value[self.sharding.slices(rank)])
            if frame is None and outside.is_ahead(self):
                self.outside.parameter.copy_(value)

    def assign_parts(self, part: Callable[[tuple[slice, ...]], torch.Tensor]) -> None:
        """Writes each rank's shard of a value that is cut; `part` gives the slices."""
        with torch.no_grad():
            for rank in self.world.ranks:
                self.settled(rank).copy_(part(self.shardings.stored.slices(rank)))
        self.follow_shards()

    def _shard_of(self, value: torch.Tensor, rank: int) -> torch.Tensor:
        stored = self.shardings.stored
        if stored.layout.partial:
            here = self.world.mesh.coordinate(rank)
            if any(here[axis] for axis, op in stored.layout.partial if op == "sum"):
                return torch.zeros_like(value)
            return value
        return value[stored.slices(rank)] if stored.layout.dims else value

    def settled(self, rank: int) -> torch.nn.Parameter:
        """The stored value, when what the last update sent has come."""
        outside.settle(self)
        if self.is_kept and rank in self.units:
            self.units[rank].finish()
        return self.shards[rank]

    def lent(self, rank: int) -> torch.nn.Parameter:
        """The stored value for somebody who may write into it."""
        for unit in self.gathered_by(rank):
            unit.finish()
            unit.is_lent = True
        return self.settled(rank)

    def gathered_by(self, rank: int) -> list[Unit]:
        """The units that it is in."""
        units = [self.units[rank]] if rank in self.units else []
        return [*units, self.lows[rank].unit] if rank in self.lows else units

    def follow_shards(self) -> None:
        """The stored shards were written: what layers compute with is gathered anew when it is next needed."""
        for rank in self.units:
            for unit in self.gathered_by(rank):
                unit.free()
        if outside.is_ahead(self):
            outside.take(self)

    # reading ------------------------------------------------------------------------------------------------------

    def local(self, frame: Frame | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns what a layer computes with on the rank at work; fetched from other data ranks if need be.

        Args:
            dtype: in which it is about to be read. What is returned is in this dtype or in its own.
        """
        rank = self.rank_at_work(frame)
        low = self.lows.get(rank)
        if low is not None and low.value.dtype == dtype:
            return low.read()
        unit = self.units.get(rank)
        if unit is not None:
            unit.need(self)
        elif not self.is_kept:
            if frame is not None:
                raise self.world.of_no_model(self.path)
            return self.shards[rank]
        return self.leaves[rank]

    def rank_at_work(self, frame: Frame | None) -> int:
        """Returns the rank of a frame; outside of frames this process's (first) one."""
        outside.reach(self)
        return self.world.ranks[0] if frame is None else frame.rank

    def own(self, frame: Frame | None) -> torch.nn.Parameter:
        """Returns what an optimizer sees on the rank at work: the part that has the gradient."""
        return self.states[self.rank_at_work(frame)]

    def parameter(self) -> torch.nn.Parameter:
        """Returns what torch sees of the variable: this process's stored shard, or the simulator program's."""
        return self.outside.parameter if self.world.runs_several else self.settled(self.world.ranks[0])

    @property
    def outside(self) -> outside.Outside:
        """The parameter and gradient that the simulator's program has of it."""
        if self.of_program is None:
            self.of_program = outside.Outside.like(self.shards[self.world.ranks[0]], self.shardings.stored.shape)
        return self.of_program

    def follow(self, before: Storage) -> None:
        """It is the same variable's: the program goes on with the parameter that it has."""
        self.of_program = before.of_program
        if outside.is_ahead(self):
            outside.take(self)

    def leaf(self, rank: int) -> torch.nn.Parameter:
        """Returns where a rank's gradient arrives; its value need not be there."""
        return self.leaves[rank]

    def note_cast(self, frame: Frame, value: torch.Tensor, cast: torch.Tensor) -> None:
        """`cast` is `value` in the dtype of computation: it goes where the value goes."""
        unit = self.units.get(frame.rank)
        leaf = self.leaves[frame.rank]
        if unit is not None and not unit.is_kept and value is leaf:
            unit.note_cast(leaf, cast)

    @contextlib.contextmanager
    def in_use(self, frame: Frame) -> Iterator[None]:
        """Keeps what a layer computes with where it is, inside."""
        with contextlib.ExitStack() as stack:
            for unit in self.gathered_by(frame.rank):
                stack.enter_context(unit.in_use())
            yield

    def whole(
        self, frame: Frame | None, *, differentiable: bool = False, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The whole value: a collective of the mesh, except where it is whole on every rank.

        In a frame it is differentiable on demand: model axes give each rank the same gradient (I), data axes
        gradients of their own rows (F). `dtype` is as in `local`.
        """
        if frame is not None and (self.is_kept or frame.rank in self.units):
            held = self.local(frame, dtype)
            return held if self.is_whole else self._moved(held, self.sharding, differentiable)
        stored = self.shardings.stored
        if frame is None and self.world.is_virtual:
            return outside.whole(self)
        shard = self.settled(self.rank_at_work(frame))
        if not stored.layout.dims and not stored.layout.partial:
            return shard
        if frame is None and collective_traversal.was_read():
            return torch.empty(stored.shape, dtype=shard.dtype, device=shard.device)
        return self._moved(shard, stored, differentiable)

    def _moved(self, shard: torch.Tensor, sharding: Sharding, differentiable: bool) -> torch.Tensor:
        fanned = tuple(a for a in sharding.layout.sharded_axes if a in self.world.data_axes)
        target = sharding.with_layout(Layout(fanout=fanned) if differentiable else Layout())
        frame = context.frame()
        with events.for_purpose(self.path):
            if differentiable:
                whole = self.world.backend.redistribute(shard, sharding, target)
                if frame is None and fanned and whole.requires_grad:
                    # A loop of the user's own: gradients are averaged, as those that the reducer sums are.
                    shards = self.world.mesh.axis_size(fanned)
                    whole.register_hook(lambda grad: grad / shards)
                return whole
            with torch.no_grad():
                return self.world.backend.redistribute(shard.detach(), sharding, target)

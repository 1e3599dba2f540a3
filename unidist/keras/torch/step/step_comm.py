"""Traffic: moves a rank's gradients to where they are kept, and values to where layers need them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unidist.errors import CapabilityError
from unidist.keras.layer_facts import overwritten
from unidist.keras.patching.compat import LossScaleOptimizer, TorchModuleWrapper, TorchTrainer
from unidist.keras.torch import outside
from unidist.keras.torch.context import Frame
from unidist.keras.torch.layers.sequence import SharedWeights
from unidist.keras.torch.params import compute_dtype
from unidist.keras.torch.params.buckets import Watched
from unidist.keras.torch.params.param_groups import Fetcher, Read, use_in_calls
from unidist.keras.torch.params.storage import Storage
from unidist.keras.torch.params.variables import DistributedVariable
from unidist.keras.torch.step import eagerly
from unidist.keras.torch.step.program_params import ProgramBucket, ProgramCutBucket, ProgramUnit
from unidist.keras.torch.step.reducer import Reducer
from unidist.keras.torch.world import RankWorld
from unidist.planner.fetching import by_reads
from unidist.strategies.strategy import InParts

# "gradients": those that wait on a rank for others, of all variables that train, where some do. "values": for each
# lasting unit, what arrives of it.
Carried = dict[str, list[Any]]


class Traffic:
    """The reducers and fetchers of this process's ranks for one model.

    Args:
        in_parts: layers compute with parts of sequences: "whole" weights, or "all"; None: they do not.
        reads: what a training step reads, where that is known.

    Raises:
        CapabilityError: the model computes in a way that stored shards do not go with.
    """

    def __init__(
        self, model: Any, world: RankWorld, *, in_parts: InParts = None, reads: Sequence[Read] | None = None
    ) -> None:
        self.model = model
        self.world = world
        self._in_parts = in_parts
        self._undo: list[Callable[[], None]] = []
        made = _variables_by_layer(model)
        reads = _still_there(reads or (), made)
        by_layer = self._by_layer = [made[n] for n in _order(made, reads or ())]
        self._is_ordered = reads is not None
        fetched = [(layer, own) for layer, own in by_layer if any(not v._storage.is_kept for v in own)]
        _check_modules(by_layer)
        trainable = self._watched = [v._storage for v in model.trainable_variables]
        for storage in trainable:
            storage.watchers += 1
        placed = [v for v in model.variables if isinstance(v, DistributedVariable)]
        self._trained = {v._storage: outside.follow_torch(v._storage) for v in placed}
        for layer in model._flatten_layers():
            for variable in overwritten(layer):
                variable._storage.is_overwritten = True
        self._reducers = {rank: Reducer(world, rank, self._watched_on(rank)) for rank in world.ranks}
        self._layers = [[v._storage for v in own] for _, own in by_layer]
        self._lows = {
            id(v._storage): dtype for layer, own in by_layer for v in own if (dtype := compute_dtype.expected(layer, v))
        }
        self._fetchers = {rank: Fetcher(world, rank, self._layers, self._lows, reads) for rank in world.ranks}
        self._make_ready()
        for layer, own in fetched:
            self._undo.append(use_in_calls(layer, [v._storage for v in own]))
        self.fetches = bool(fetched)
        self._has_modules = eagerly.has_modules(model)

    def _watched_on(self, rank: int) -> list[Watched]:
        return [Watched.of(p, rank, late=self._is_late(p)) for p in self._watched]

    def misses_some(self) -> bool:
        """Says whether a variable trains by now that did not when gradients were first watched."""
        misses = False
        for storage, was in self._trained.items():
            misses = (outside.follow_torch(storage) and not was) or misses
        return misses

    def close(self) -> None:
        """Stops watching and fetching."""
        for storage in self._watched:
            storage.watchers -= 1
        for undo in self._undo:
            undo()
        for reducer in self._reducers.values():
            reducer.close()
        for fetcher in self._fetchers.values():
            fetcher.close()

    def _make_ready(self) -> None:
        """Makes what carries the groups' tensors now: amid a backward it would hold up gradients' thread."""
        for rank in self.world.ranks:
            buckets, units = self._reducers[rank].buckets, self._fetchers[rank].units
            groups = [b.group for b in buckets] + [u.buffer.group for u in units]
            for group in {group.ranks: group for group in groups}.values():
                self.world.backend.ready(group)

    @property
    def reads(self) -> Sequence[Read] | None:
        """The reads of a training step, in its order; None where no step has shown them yet."""
        return self._fetchers[self.world.ranks[0]].reads

    def ordered(self) -> Traffic:
        """Returns the traffic whose units are in the order in which a training step has read variables."""
        reads = self.reads
        if self._is_ordered or reads is None:
            return self
        self._is_ordered = True
        if _order(self._by_layer, reads) == list(range(len(self._by_layer))):
            return self
        self.settle()
        self.close()
        return Traffic(self.model, self.world, in_parts=self._in_parts, reads=reads)

    def reducer(self, rank: int) -> Reducer:
        return self._reducers[rank]

    @contextlib.contextmanager
    def step(self, frame: Frame, kind: str) -> Iterator[None]:
        """A step of Keras's trainer ("train", "test" or "predict") on a rank."""
        reducer, fetcher = self._reducers[frame.rank], self._fetchers[frame.rank]
        if self._has_modules:
            fetcher.settle()  # torch modules do not wait for what they read
        waits = kind == "train" and self.accumulates()
        try:
            with self._moving(frame, kind, reducer, fetcher, holds=reducer.is_holding, waits=waits):
                yield
        finally:
            if reducer.is_paused:
                reducer.is_paused, reducer.is_holding = False, True

    @contextlib.contextmanager
    def traced(self, frame: Frame, kind: str, carried: Carried, waits: bool) -> Iterator[Fetcher]:
        """A step that becomes a program: what it moves is part of the program. Variables are stand-ins.

        Args:
            carried: stands for what passes to the step. waits: whether the step's gradients wait.
        """
        rank = frame.rank
        reducer = Reducer(self.world, rank, self._watched_on(rank), ProgramBucket, ProgramCutBucket)
        fetcher = Fetcher(self.world, rank, self._layers, self._lows, self.reads, ProgramUnit)
        fetcher.follow(self._fetchers[rank])
        self._put_gradients(rank, carried["gradients"])
        if carried["values"]:
            fetcher.bring(carried["values"])
        try:
            with self._moving(frame, kind, reducer, fetcher, holds=bool(carried["gradients"]), waits=waits):
                yield fetcher
        finally:
            fetcher.close()
            reducer.close()

    @contextlib.contextmanager
    def _moving(
        self, frame: Frame, kind: str, reducer: Reducer, fetcher: Fetcher, *, holds: bool, waits: bool
    ) -> Iterator[None]:
        """A step whose gradients and values these move.

        Args:
            holds: gradients wait on the rank. waits: whether this step's wait as well.
        """
        frame.fetcher = fetcher if fetcher.fetched else None
        frame.shared = self._shared(frame)
        frame.keeps_gradients = reducer.is_holding = holds
        frame.accumulating = reducer.is_paused = waits
        try:
            with reducer.working(frame), fetcher.step(kind):
                yield
        finally:
            # What they hold leads back to the frame, and would live until Python looks for cycles.
            frame.shared = frame.fetcher = None

    def _shared(self, frame: Frame) -> SharedWeights | None:
        """Returns what sums gradients of weights used on parts of sequences, for one step."""
        if not self._in_parts:
            return None
        storages = [v._storage for v in self.model.trainable_variables if isinstance(v, DistributedVariable)]
        return SharedWeights(frame, [p.leaf(frame.rank) for p in storages if self._is_late(p)])

    def _is_late(self, storage: Storage) -> bool:
        return self._in_parts is not None and storage.is_kept and (storage.is_whole or self._in_parts == "all")

    def settle(self) -> None:
        """Waits for what is under way."""
        for fetcher in self._fetchers.values():
            fetcher.settle()

    # between programs ---------------------------------------------------------------------------------------------

    def carried(self, rank: int, *, adds: bool) -> Carried:
        """Returns what passes to a training step beside variables' values.

        Args:
            adds: whether the step adds to gradients that wait.
        """
        values = [unit.rows() for unit in self._fetchers[rank].lasting]
        return {"gradients": self._waiting(rank) if adds else [], "values": values}

    def bring(self, rank: int, left: list[list[torch.Tensor]]) -> None:
        """Takes over the values that a program has left under way."""
        self._fetchers[rank].bring(left)

    # accumulation -------------------------------------------------------------------------------------------------

    def _waiting(self, rank: int) -> list[torch.Tensor]:
        """The gradients that wait on a rank, of all variables that train: zeros where none do yet."""
        is_holding = self.is_holding(rank)
        for leaf in self._leaves(rank):
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
            elif not is_holding:
                leaf.grad.zero_()
        return [grad for grad in self.gradients(rank) if grad is not None]

    def is_holding(self, rank: int) -> bool:
        """Returns whether gradients wait on a rank."""
        return self._reducers[rank].is_holding

    def hold(self, rank: int, is_holding: bool) -> None:
        """Notes whether gradients wait on a rank, behind a step that was a program; else they are let go."""
        self._reducers[rank].is_holding = is_holding
        for storage in self._watched if not is_holding else ():
            storage.forget_gradients(rank)

    def gradients(self, rank: int) -> list[torch.Tensor | None]:
        """The gradients of all variables that train, as they are on a rank."""
        return [leaf.grad for leaf in self._leaves(rank)]

    def _put_gradients(self, rank: int, grads: Sequence[torch.Tensor | None]) -> None:
        for leaf, grad in zip(self._leaves(rank), grads, strict=False):
            leaf.grad = grad

    def _leaves(self, rank: int) -> list[torch.nn.Parameter]:
        return [leaf for storage in self._watched if (leaf := storage.leaf(rank)).requires_grad]

    def accumulates(self) -> bool:
        """Returns whether this step's gradients may wait on their ranks for later ones: nothing is sent.

        Not where somebody looks at them in between, nor where values are stored as shards: whole gradients would be
        kept there. Nor where Keras takes the largest of some, and not their sum.
        """
        optimizer = getattr(self.model, "optimizer", None)
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        own_step = type(self.model).train_step is not TorchTrainer.train_step
        if not steps or own_step or self.fetches or isinstance(optimizer, LossScaleOptimizer):
            return False
        if any(map(overwritten, self.model._flatten_layers())):
            return False
        return bool((int(self.model.optimizer._iterations.value) + 1) % steps)

    def flush(self, frame: Frame) -> None:
        """Reduces what waits on its rank into the optimizer's accumulators, where one device would have it.

        It waits no more, so the next step's zero_grad forgets it.
        """
        reducer = self._reducers[frame.rank]
        if not reducer.is_holding:
            return
        reducer.reduce()
        optimizer = self.model.optimizer
        with frame.reading_shards(), torch.no_grad():
            for variable in self.model.trainable_variables:
                grad = variable._storage.own(frame).grad
                if grad is not None:
                    optimizer._accumulated_gradients[optimizer._get_variable_index(variable)].assign_add(grad)


_ByLayer = list[tuple[Any, list[DistributedVariable]]]


def _check_modules(by_layer: _ByLayer) -> None:
    for layer, own in by_layer:
        cut = [v for v in own if v._storage.is_cut] if isinstance(layer, TorchModuleWrapper) else []
        if cut:
            layout = cut[0]._storage.shardings.stored.layout
            raise CapabilityError(
                f"layer {layer.name!r} wraps a torch module, which reads its own parameters, and {cut[0].path!r} would "
                f"be {layout.in_words}. Use zero=2 or less, and no rule that cuts it"
            )


def _order(by_layer: _ByLayer, reads: Sequence[Read]) -> list[int]:
    return by_reads([[id(v._storage) for v in own] for _, own in by_layer], [id(storage) for storage, _ in reads])


def _still_there(reads: Sequence[Read], by_layer: _ByLayer) -> Sequence[Read] | None:
    """Returns the reads of variables that are where they were; None where there are none."""
    there = {id(v._storage) for _, own in by_layer for v in own}
    return [one for one in reads if id(one[0]) in there] or None


def _variables_by_layer(model: Any) -> _ByLayer:
    seen: set[int] = set()
    found = []
    for layer in model._flatten_layers():
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        fresh = [v for v in own if isinstance(v, DistributedVariable) and id(v._storage) not in seen]
        seen.update(id(v._storage) for v in fresh)
        if fresh:
            found.append((layer, fresh))
    return found

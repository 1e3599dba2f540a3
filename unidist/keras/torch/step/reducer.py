"""Reducer: sums gradients over the data axes in flat buckets, while backward still runs.

It does so by all_reduce where each data rank keeps the whole sum, by reduce_scatter where each keeps its part.

Source of the method: PyTorch DistributedDataParallel (Li et al., VLDB 2020): buckets in the order in which backward
fills them, a small first one, launched strictly in order so that all ranks agree.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from unidist import events
from unidist.errors import ArgumentError
from unidist.keras.stateful_layers import refuse_in_a_loop
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params.buckets import Bucket, CutBucket, Watched, WholeBucket
from unidist.keras.torch.world import RankWorld

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
# Buckets that are cut among the ranks are let go as soon as they are reduced; so many may be under way at once.
SCATTERED_AT_ONCE = 2

_F = TypeVar("_F", bound=Callable[..., Any])


def bucket_bytes() -> int:
    """Bytes of a bucket: UNIDIST_BUCKET_MB, or 25 MiB.

    Raises:
        ArgumentError: the variable holds no positive number.
    """
    given = os.environ.get("UNIDIST_BUCKET_MB")
    if given is None:
        return BUCKET_BYTES
    try:
        size = float(given)
    except ValueError:
        size = 0.0
    if size <= 0:
        raise ArgumentError(f"UNIDIST_BUCKET_MB={given!r}: give the size of a gradient bucket in MiB, above 0")
    return int(size * (1 << 20))


def _watchers(leaf: torch.nn.Parameter) -> list[Reducer]:
    found: list[Reducer] = vars(leaf).setdefault(_WATCHERS, [])
    return found


def _note_change() -> None:
    global _changes
    _changes += 1


def _first(watching: list[Reducer], at_work: Reducer | None) -> Reducer:
    return at_work if at_work is not None and at_work in watching else watching[0]


def _untraced(function: _F) -> _F:
    """Kept out of torch.compile's programs: starting a collective is no part of one."""
    return cast(_F, torch.compiler.disable(function))


# rank -> the reducer of the step of Keras's trainer that is going on there
_at_work: dict[int, Reducer] = {}
# Of a leaf: the reducers that watch it, of a model and of those that it is a part of.
_WATCHERS = "_unidist_reducers"
# Counts what leaves have begun or ceased to be watched.
_changes = 0


class Reducer:
    """Watches one rank's parameters and reduces their gradients.

    A leaf that several models have is watched by the reducers of all. One of them sees to it in a backward: that of the
    model whose step it is, else the first.

    Args:
        world: the ranks. rank: the one whose parameters these are.
        watched: the variables, in the order of the model.
        whole, cut: the kinds of buckets whose sums are on every rank, and are cut among the ranks.

    Attributes:
        launched_early: bytes of the gradients that were under way before the last backward had ended.
    """

    def __init__(
        self,
        world: RankWorld,
        rank: int,
        watched: Iterable[Watched],
        whole: type[Bucket] = WholeBucket,
        cut: type[Bucket] = CutBucket,
    ) -> None:
        self.world = world
        self.rank = rank
        self.buckets: list[Bucket] = []
        self.frame: Frame | None = None
        self.is_paused = False
        # What leaves hold from steps of an accumulation is not reduced yet.
        self.is_holding = False
        self._place_of: dict[int, tuple[Bucket, int]] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._next = 0
        self._finished = 0
        self._running = False
        # What torch calls at the end of the backward that is going on: torch lets go of it, also where that breaks off.
        self._at_end: Callable[[], object] = lambda: None
        self._divided: tuple[Reducer | None, int] = (None, -1)
        self._has_own = True
        self._whole, self._cut_kind = whole, cut
        self._is_own_loop = False  # the backward that is going on is of no step of Keras's trainer
        self._hooks: list[Any] = []
        self._accumulating: list[Any] = []  # nodes of the graph, whose hooks live no longer than they do
        self.launched_early = 0
        self.watched = [w for w in watched if w.leaf.requires_grad]
        self._replaces = next((w.replaces for w in self.watched if w.replaces and w.axes), "")
        for members in self._by_kind():
            self._cut(members)
        self._order()
        for bucket in self.buckets:
            for place, member in enumerate(bucket.members):
                self._place_of[id(member.leaf)] = bucket, place
        for member in self.watched:
            # Before gradients are accumulated: autograd.grad, which accumulates none, is no backward of ours.
            accumulating = torch.autograd.graph.get_gradient_edge(member.leaf).node
            self._accumulating.append(accumulating)
            self._hooks.append(accumulating.register_prehook(self._arriving))
            if id(member.leaf) in self._place_of:
                self._hooks.append(member.leaf.register_post_accumulate_grad_hook(self._arrived))
            _watchers(member.leaf).append(self)
        _note_change()

    @contextlib.contextmanager
    def working(self, frame: Frame) -> Iterator[None]:
        """Inside is a step of its model on its rank."""
        before = _at_work.get(self.rank)
        _at_work[self.rank], self.frame = self, frame
        try:
            yield
        finally:
            self.frame = None
            if before is None:
                del _at_work[self.rank]
            else:
                _at_work[self.rank] = before

    def _divide_up(self) -> bool:
        """Notes what others see to in the backward that begins. Whether anything is left."""
        here = _at_work.get(self.rank)
        if self._divided != (here, _changes):
            others = {id(m.leaf) for m in self.watched if _first(_watchers(m.leaf), here) is not self}
            for bucket in self.buckets:
                bucket.left = others
            self._has_own = len(others) < len(self.watched)
            self._divided = here, _changes
        return self._has_own

    def _by_kind(self) -> list[list[Watched]]:
        kinds: dict[Any, list[Watched]] = {}
        for member in reversed(self.watched):
            if member.axes or member.drifting:
                kinds.setdefault(member.kind, []).append(member)
        return [members for _, members in sorted(kinds.items(), key=lambda kind: bool(kind[0][0]))]

    def _cut(self, members: list[Watched]) -> None:
        kind = self._cut_kind if members[0].cut_axes else self._whole
        usual = bucket_bytes()
        limit = min(FIRST_BUCKET_BYTES, usual) if not self.buckets else usual
        current: list[Watched] = []
        size = 0
        for member in members:
            current.append(member)
            size += member.leaf.numel() * member.leaf.element_size()
            if size >= limit:
                self.buckets.append(kind(self.world, self.rank, current))
                current, size, limit = [], 0, usual
        if current:
            self.buckets.append(kind(self.world, self.rank, current))

    def _order(self) -> None:
        """Orders buckets of several kinds as backward fills them.

        So none waits for another that is full at the end alone.
        """
        filled = {id(member): k for k, member in enumerate(reversed(self.watched))}
        self.buckets.sort(key=lambda bucket: (bucket.members[0].late, filled[id(bucket.members[-1])]))

    def close(self) -> None:
        """Stops watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._accumulating.clear()
        for member in self.watched:
            _watchers(member.leaf).remove(self)
        _note_change()

    # what happens in backward -------------------------------------------------------------------------------------

    @_untraced
    def _arriving(self, grads: tuple[torch.Tensor, ...]) -> None:
        if self._running:
            if self._at_end() is not None:
                return
            self._break_off()
        if not self._divide_up():
            return
        is_own_loop = self.rank not in _at_work
        if is_own_loop and self._replaces:
            refuse_in_a_loop(self._replaces)
        self._running, self._is_own_loop = True, is_own_loop
        self.launched_early = 0
        at_end = functools.partial(self._finish)
        self._at_end = weakref.ref(at_end)
        torch.autograd.Variable._execution_engine.queue_callback(at_end)
        del at_end  # a traceback that somebody keeps would hold it
        if not self.is_paused and not self.is_holding:
            self._set_aside()

    def _set_aside(self) -> None:
        """Sets aside what an earlier backward left, which is reduced already.

        It must not be summed again, whether or not more of it comes.
        """
        for member in [m for bucket in self.buckets for m in bucket.members if id(m.leaf) not in bucket.left]:
            if member.target.grad is not None:
                # Not what the bucket will be reduced into: that was given away (_hand_out).
                self._kept[id(member.leaf)] = member.target.grad
                member.target.grad = None

    @_untraced
    def _arrived(self, p: torch.nn.Parameter) -> None:
        if not self._running:
            return
        bucket, place = self._place_of[id(p)]
        bucket.take(place)
        if self.is_paused:
            return
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing <= 0:
            self.launched_early += self.buckets[self._next].nbytes
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        with events.for_purpose("gradient"), torch.no_grad():
            bucket.launch()
            self._next += 1
            if bucket.members[0].cut_axes:
                while self._next - self._finished > SCATTERED_AT_ONCE:
                    self._hand_out()

    def _hand_out(self) -> None:
        bucket = self.buckets[self._finished]
        views = bucket.finish()
        if self._is_own_loop:
            # A loop of the user's own, whose losses are means of its own rows: as in DistributedDataParallel.
            torch._foreach_div_(views, float(bucket.shards))
        used = bucket.used(views)
        for k, (member, view) in enumerate(zip(bucket.members, views, strict=True)):
            if id(member.leaf) in bucket.left:
                continue
            before = self._kept.pop(id(member.leaf), None)
            if not used[k]:
                member.target.grad = before
                continue
            if before is not None:
                member.target.grad = before + view
            elif member.target.grad is not view:
                member.target.grad = view
        bucket.missing = len(bucket.members)
        if self._is_own_loop or (self.frame is not None and self.frame.own_step):
            bucket.give_away()  # a loop or a step of the user's own may keep gradients from step to step
        self._finished += 1

    def _break_off(self) -> None:
        """Forgets a backward that raised, as for want of memory, and what its gradients were to be added to.

        What it had launched is waited for: the buffers are used again.
        """
        with events.for_purpose("gradient"), torch.no_grad():
            for bucket in self.buckets:
                bucket.finish()
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
            for member in bucket.members:
                if id(member.leaf) not in bucket.left:
                    member.leaf.grad = member.target.grad = None
        self._kept.clear()
        self._next = self._finished = 0
        self._running = self._is_own_loop = self.is_holding = False

    @_untraced
    def _finish(self) -> None:
        """At the end of backward: launches what is left, waits, and hands the sums out as the gradients."""
        frame = self.frame
        if frame is not None:
            frame.backward_done = True
        if not self.is_paused:
            self.reduce()
        self._running = self._is_own_loop = False

    def reduce(self) -> None:
        """Launches every bucket that was not, and hands all out."""
        with events.for_purpose("gradient"), torch.no_grad():
            while self._next < len(self.buckets):
                self._launch()
            while self._finished < len(self.buckets):
                self._hand_out()
        self._next = self._finished = 0
        self.is_holding = False

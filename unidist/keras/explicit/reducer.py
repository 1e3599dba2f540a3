"""Reducer: gradients are summed over the data axes in flat buckets, while backward still runs.

Source of the method: PyTorch DistributedDataParallel (Li et al., VLDB 2020): buckets in the order in which backward
fills them, a small first one, launched strictly in order so that all ranks agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

from unidist import events
from unidist.algebra import Axes, Group
from unidist.errors import CapabilityError
from unidist.keras.explicit import context
from unidist.keras.explicit.world import RankWorld

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20

_F = TypeVar("_F", bound=Callable[..., Any])


def _untraced(function: _F) -> _F:
    """Kept out of torch.compile's programs: starting a collective is no part of one."""
    return cast(_F, torch.compiler.disable(function))


class Bucket:
    """Gradients of one dtype that are reduced over one group, as one flat buffer."""

    def __init__(self, axes: Axes, group: Group, parameters: list[torch.nn.Parameter]) -> None:
        self.axes = axes
        self.group = group
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.views: list[torch.Tensor] = []
        start = 0
        for p in parameters:
            self.views.append(self.flat[start : start + p.numel()].view(p.shape))
            start += p.numel()
        self.missing = len(parameters)
        self.handle: Any = None

    def collect(self) -> list[bool]:
        """Copies the gradients into the buffer; which of them exist."""
        have = [p.grad is not None for p in self.parameters]
        full = [(v, p.grad) for v, p in zip(self.views, self.parameters, strict=True) if p.grad is not None]
        if len(full) < len(have):
            self.flat.zero_()
        if full:
            torch._foreach_copy_([v for v, _ in full], [g for _, g in full])
        return have


class Reducer:
    """Watches one rank's parameters and sums their gradients over `axes_of` each of them.

    Args:
        world: the ranks. rank: the one whose parameters these are.
        parameters: (parameter, axes over which its gradient arrives partial), in the order of the model.
    """

    def __init__(self, world: RankWorld, rank: int, parameters: Iterable[tuple[torch.nn.Parameter, Axes]]) -> None:
        self.world = world
        self.rank = rank
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._next = 0
        self._have: dict[int, list[bool]] = {}
        self._running = False
        self._hooks: list[Any] = []
        self._paused = False
        watched = [(p, axes) for p, axes in parameters if p.requires_grad]
        for axes, members in self._by_kind(watched):
            self._cut(axes, members)
        for bucket in self.buckets:
            for p in bucket.parameters:
                self._bucket_of[id(p)] = bucket
                self._hooks.append(p.register_hook(self._keeper(p)))
        for p, _ in watched:
            self._hooks.append(p.register_post_accumulate_grad_hook(self._arrived))

    @staticmethod
    def _by_kind(
        parameters: Iterable[tuple[torch.nn.Parameter, Axes]],
    ) -> list[tuple[Axes, list[torch.nn.Parameter]]]:
        kinds: dict[tuple[Axes, torch.dtype], list[torch.nn.Parameter]] = {}
        for p, axes in reversed(list(parameters)):
            if axes:
                kinds.setdefault((axes, p.dtype), []).append(p)
        return [(axes, members) for (axes, _), members in kinds.items()]

    def _cut(self, axes: Axes, members: list[torch.nn.Parameter]) -> None:
        group = self.world.mesh.group(axes, self.rank)
        limit = FIRST_BUCKET_BYTES if not self.buckets else BUCKET_BYTES
        current: list[torch.nn.Parameter] = []
        size = 0
        for p in members:
            current.append(p)
            size += p.numel() * p.element_size()
            if size >= limit:
                self.buckets.append(Bucket(axes, group, current))
                current, size, limit = [], 0, BUCKET_BYTES
        if current:
            self.buckets.append(Bucket(axes, group, current))

    def close(self) -> None:
        """Stops watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextlib.contextmanager
    def paused(self) -> Any:
        """Gradients inside stay local."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    # what happens in backward -------------------------------------------------------------------------------------

    def _keeper(self, p: torch.nn.Parameter) -> Any:
        def before_accumulation(grad: torch.Tensor) -> None:
            # What an earlier backward left is reduced already: it must not be summed again.
            if not self._paused and p.grad is not None:
                self._kept[id(p)] = p.grad.clone()
                p.grad = None

        return before_accumulation

    @_untraced
    def _arrived(self, p: torch.nn.Parameter) -> None:
        if self._paused:
            return
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket = self._bucket_of.get(id(p))
        if bucket is None:
            return
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing <= 0:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        self._have[id(bucket)] = bucket.collect()
        backend = self.world.backend
        with events.for_purpose("gradient"), torch.no_grad():
            backend.record("all_reduce", bucket.axes, bucket.group, bucket.flat)
            bucket.handle = backend.comm.all_reduce_inplace(bucket.flat, bucket.group, "sum")
        self._next += 1

    @_untraced
    def _finish(self) -> None:
        """At the end of backward: launches what is left, waits, and hands the sums out as the gradients."""
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
        for bucket in self.buckets:
            bucket.handle.wait()
            for p, view, had in zip(bucket.parameters, bucket.views, self._have[id(bucket)], strict=True):
                kept = self._kept.pop(id(p), None)
                if not had and not bool(view.any()):
                    p.grad = kept
                    continue
                p.grad = view if kept is None else kept + view
            bucket.handle, bucket.missing = None, len(bucket.parameters)
        self._next, self._running = 0, False
        self._have.clear()
        frame = context.frame()
        if frame is not None:
            frame.backward_done = True
            if self.buckets and frame.rows is not None and not frame.exact_loss:
                raise CapabilityError(
                    "train_step computed its loss by itself, from this rank's rows alone, so its gradient is not that "
                    "of the global mean: compute it with self.compute_loss(x=x, y=y, y_pred=y_pred) or a "
                    "keras.losses.Loss that reduces (not reduction='none')"
                )

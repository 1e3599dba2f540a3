"""A step of the user's own that computes with rows by itself: it sees the rows of all shards.

A train_step or a test_step is given this shard's rows. What Keras's losses and metrics make of them is of all rows. But
a step may compute more by itself: a loss by hand, or the largest prediction of a batch. Such a step is given RowParts
(rowparts.py), as a layer is that looks at several rows. So whatever it computes is one device's.

The first step sees all rows, and shows whether it has to: it looks at other rows than its own, computes with their
number, or makes gradients of more than Keras's losses. If not, the next ones are given this shard's rows, which costs
nothing. If a later one changes its mind before a gradient is made, it begins again, and what it has written until then
is put back. If that shows behind it, the step after it sees all rows.

In such a step what is no RowPart is the same on all ranks, and its gradient is partial (layout F). So a gradient begins
on each rank with that rank's part: one over the number of data shards.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from unidist import events
from unidist.algebra import Layout
from unidist.errors import CapabilityError
from unidist.keras.compat import GLOBAL_SEED_GENERATOR, global_state, tree
from unidist.keras.torch import context, data
from unidist.keras.torch.context import Before, Frame
from unidist.keras.torch.moving import move
from unidist.keras.torch.rows import mixing, regions
from unidist.keras.torch.rows.counts import Counting
from unidist.keras.torch.rows.parts import mapped, whole
from unidist.keras.torch.rows.rowparts import RowPart
from unidist.keras.torch.world import RankWorld

T = TypeVar("T")

# Behind the first two steps, numbers that a step gives to means are compared in one of so many.
_STRIDE = 64


# The frame of a process's one rank, in such a step.
_alone: Frame | None = None


def frame_of_backward() -> Frame | None:
    """The rank whose gradient begins: also where a step calls backward in a thread of its own."""
    return context.frame() or _alone


class OwnSteps:
    """The steps of a model's own, and which of them see the rows of all shards.

    Attributes:
        seeing: of "train" and "test" those that do.
    """

    def __init__(self, model: Any, world: RankWorld) -> None:
        self.seeing: set[str] = set()
        self._model = model
        self._world = world
        self._draws: bool | None = None  # not known yet
        self._tried: set[str] = set()
        self._steps = 0

    def run(self, kind: str, work: Callable[[Frame], T]) -> T:
        """A step on every rank of this process.

        Raises:
            CapabilityError: it computes with rows by itself where it cannot be given those of all shards.
        """
        if self._model.jit_compile:
            return self._world.run(work)
        if kind not in self._tried:
            return self._first(kind, work)
        if kind in self.seeing:
            return self._seeing(kind, work)
        attempt = _Attempt(self._world, compares=self._steps < 2 or self._steps % _STRIDE == 0)
        self._steps += 1
        try:
            out = attempt.run(work)
        except regions.LooksAtRowsError:
            attempt.undo()
            self._let_see(kind)
            return self._seeing(kind, work)
        if attempt.tells_numbers:
            self._let_see(kind)
        return out

    def _first(self, kind: str, work: Callable[[Frame], T]) -> T:
        """A first step sees all rows, and shows whether it has to."""

        def looking(frame: Frame) -> T:
            with Counting():
                out = work(frame)
            if frame.step is not None and frame.step.mixes:
                self.seeing.add(kind)
            return out

        mixing.leave_regions(self._model)
        out = self._seeing(kind, looking)
        self._tried.add(kind)
        return out

    @property
    def why(self) -> list[tuple[str, str]]:
        """The steps that see the rows of all shards, and the reason."""
        reason = "given the rows of all shards: it computes with rows by itself"
        return [(f"{kind}_step of {self._model.name}", reason) for kind in sorted(self.seeing)]

    def _let_see(self, kind: str) -> None:
        self.seeing.add(kind)
        mixing.leave_regions(self._model)

    def _seeing(self, kind: str, work: Callable[[Frame], T]) -> T:
        """Random numbers that the step draws by itself are the same on all ranks."""

        def seeing(frame: Frame) -> T:
            global _alone
            frame.sees_rows = True
            _alone = None if self._world.is_virtual else frame
            try:
                return work(frame)
            finally:
                _alone = None

        if self._world.is_virtual:
            before = _Drawn.now().digest()
            out = self._world.run(seeing)
            if self._world.mesh.size > 1 and before != _Drawn.now().digest() and kind in self.seeing:
                raise CapabilityError(
                    f"{kind}_step of {type(self._model).__name__} looks at the rows of all devices, and draws random "
                    "numbers from torch, NumPy, Python or Keras's global generator. In the simulator each device "
                    "would draw others: give keras.random a keras.random.SeedGenerator that the model has"
                )
            return out
        if self._draws is not False:
            data.share_random_state(self._world)
        before = _Drawn.now().digest()
        out = self._world.run(seeing)
        drew = before != _Drawn.now().digest()
        if drew:
            # They were shared, if it was known that the step draws; those of GPUs were not.
            data.check_alike(self._world, before, "the generators that a step draws from")
        self._draws = self._draws or drew
        return out


class _Attempt:
    """A step on this process's ranks that may have to begin again.

    Attributes:
        tells_numbers: whether it has computed numbers of rows by itself.

    Args:
        compares: what it gives to means is compared between the ranks.
    """

    def __init__(self, world: RankWorld, *, compares: bool) -> None:
        self.tells_numbers = False
        self._compares = compares
        self._world = world
        self._before: dict[int, _Shards] = {}
        self._shared: set[int] = set()
        self._drawn = _Drawn.now()

    def run(self, work: Callable[[Frame], T]) -> T:
        def noted(frame: Frame) -> T:
            self._before[frame.rank] = _Shards(frame.rank, self._shared)
            frame.numbers = [] if self._compares else None
            with frame.noting(self._before[frame.rank]):
                try:
                    out = work(frame)
                except regions.LooksAtRowsError as error:
                    if frame.has_made_gradients:
                        raise CapabilityError(_LATE) from error
                    raise
            self.tells_numbers |= frame.tells_numbers
            return out

        return self._world.run(noted)

    def undo(self) -> None:
        """Variables and generators are as they were."""
        for shards in self._before.values():
            shards.put_back()
        self._drawn.go_on()


_LATE = (
    "train_step computed a loss, or a part of it, by itself, behind another loss.backward() of the same step, so it "
    "cannot begin again with the rows of all devices. Compute this loss with self.compute_loss(x=x, y=y, "
    "y_pred=y_pred), of your own where Keras's will not do, or make the step's first loss by hand too"
)


class _Shards(Before):
    """What a rank's shards held before they were written, to be put back.

    Args:
        shared: ids of variables that all ranks of a process have in common, and that one of them has noted.
    """

    def __init__(self, rank: int, shared: set[int]) -> None:
        super().__init__()
        self._rank = rank
        self._shared = shared
        self._shards: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self, variable: Any) -> None:
        storage = getattr(variable, "_storage", None)
        shard = variable._value if storage is None else storage.settled(self._rank)
        self.values[id(variable)] = shard.detach().clone()
        if storage is None and id(variable) in self._shared:
            return
        if storage is None:
            self._shared.add(id(variable))
        self._shards.append((shard, self.values[id(variable)]))

    def put_back(self) -> None:
        with torch.no_grad():
            for shard, before in self._shards:
                shard.copy_(before)


@dataclass(frozen=True)
class _Drawn:
    """How far the generators of this process have come that a step may draw from."""

    of_python: Any
    of_numpy: Any
    of_torch: torch.Tensor
    of_cuda: torch.Tensor | None
    of_keras: torch.Tensor | None

    @staticmethod
    def now() -> _Drawn:
        generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        seed = None if generator is None else generator.state.value.detach().clone()
        of_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return _Drawn(random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), of_cuda, seed)

    def go_on(self) -> None:
        """From here."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)
        if self.of_cuda is not None:
            torch.cuda.set_rng_state(self.of_cuda)
        generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        if generator is not None and self.of_keras is not None:
            generator.state.assign(self.of_keras)

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


def region_of(frame: Frame, model: Any, kind: str) -> regions.Region | None:
    """The region of a step that sees the rows of all shards."""
    if not frame.sees_rows:
        return frame.region
    frame.step = regions.Region(f"{kind}_step of {model.name}", is_step=True)
    return frame.step


def shown(frame: Frame, batch: Any) -> Any:
    """A batch as a step is given it: this shard's rows, or those of all shards."""
    rows = frame.rows
    if not frame.sees_rows or rows is None:
        return batch

    def as_part(x: Any) -> Any:
        x = torch.from_numpy(x) if isinstance(x, np.ndarray) and x.dtype.kind in "biuf" else x
        is_cut = isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == rows.local
        return RowPart.of(frame, x, rows.total) if is_cut else x

    return mapped(as_part, batch)


def begun(frame: Frame, root: Any, gradient: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where a gradient begins that is the sum of the ranks': a tensor, and what this rank begins with."""
    tensor: torch.Tensor = whole(root)
    if gradient is None and tensor.numel() == 1:
        gradient = torch.ones_like(tensor)
    shards = frame.world.mesh.axis_size(frame.world.data_axes)
    return tensor, None if gradient is None else whole(gradient) / shards


def derived(
    frame: Frame, grad: Callable[..., Any], roots: Sequence[Any], inputs: Sequence[Any], options: dict[str, Any]
) -> list[Any]:
    """torch.autograd.grad where roots and inputs may be RowParts, or the same on all ranks.

    The gradient of a RowPart is one. That of anything else is partial.
    """
    gradients = options.get("grad_outputs")
    gradients = list(gradients) if isinstance(gradients, (list, tuple)) else [gradients] * len(roots)
    ends = [
        (root.part, _own(root, gradient)) if _is_cut(root) else begun(frame, root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
    ]
    tensors, parts = zip(*ends, strict=True)
    ends_at = [x.part if _is_cut(x) else whole(x) for x in inputs]
    with frame.making_gradients():
        found = grad(tensors, ends_at, **{**options, "grad_outputs": parts})
    return [
        x.like(g, tuple(x.shape)) if g is not None and _is_cut(x) else g for x, g in zip(inputs, found, strict=True)
    ]


def joined(frame: Frame, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A partial gradient of what is the same on all ranks, summed: P -> F."""
    if gradient is None:
        return None
    axes = frame.world.data_axes
    with events.for_purpose("gradient"):
        return move(frame, gradient, tuple(gradient.shape), Layout(partial=axes), Layout(fanout=axes))


def _is_cut(x: Any) -> bool:
    return isinstance(x, RowPart) and x.part is not None


def _own(root: RowPart, gradient: Any) -> torch.Tensor | None:
    """Of a gradient of a RowPart that of this shard's rows."""
    if gradient is None:
        return None
    return gradient.part if _is_cut(gradient) else root.operand(whole(gradient))

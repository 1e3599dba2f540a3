"""Lets optimizers' slots rest in host memory, as `offload="states"` asks.

A rank that reads a slot gets a copy on the device, and works on that: so whatever an optimizer does is done there, by
the same operations as without. Copies go back and are let go behind each turn of an update, and behind the rank's work.
Which slots a turn reads the update before has shown: those of the next turn come while one is worked on.

On CUDA what rests is pinned, and copies go both ways at once, on streams beside the computation's. Elsewhere the same
copies are made at once.

Sources of the method: ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840), whose update is the host's, and the update by
pieces of ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from unidist.keras.torch import outside
from unidist.keras.torch.context import Frame
from unidist.keras.torch.params.storage import Storage

# Gradients of a turn, in bytes: its slots, and those of the next one, are on the device at once.
TURN_BYTES = 32 << 20

Pair = tuple[Any, Any]
# Optimizer -> a turn's purpose and the ids of its variables -> the slots that it reads.
_reads: WeakKeyDictionary[Any, dict[tuple[Any, ...], list[HostStorage]]] = WeakKeyDictionary()


class Lanes:
    """Copies to and from one device.

    On CUDA each direction has a stream, and `coming` and `going` are waited for where it matters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._up: torch.cuda.Stream | None = torch.cuda.Stream(device) if is_cuda else None
        self._down: torch.cuda.Stream | None = torch.cuda.Stream(device) if is_cuda else None
        self._going: list[torch.Tensor] = []  # their memory is read until they have arrived

    def bring(self, home: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Begins to copy to the device: returns the copy, and what says that it is there."""
        made = torch.empty_like(home, device=self._device)
        if self._up is None or self._down is None:
            return made.copy_(home), None
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        self._up.wait_stream(self._down)
        with torch.cuda.stream(self._up):
            made.copy_(home, non_blocking=True)
        return made, self._up.record_event()

    def arrived(self, event: torch.cuda.Event | None) -> None:
        """Lets what is computed from here on wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def put_back(self, home: torch.Tensor, made: torch.Tensor) -> None:
        """Begins to copy to the host."""
        if self._down is None:
            home.copy_(made)
            return
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            home.copy_(made, non_blocking=True)
        self._going.append(made)

    def settle(self) -> None:
        """Waits for what goes to the host, and lets it go on the device."""
        if self._going and self._down is not None:
            self._down.synchronize()
            self._going.clear()


@functools.lru_cache(maxsize=64)
def lanes(device: torch.device) -> Lanes:
    return Lanes(device)


class HostStorage(Storage):
    """Keeps a slot in host memory, and a copy on the device for each rank that uses it.

    Attributes:
        homes: rank -> what rests, of ranks that have a copy: their shard is that copy.
        device: where copies go.
    """

    device: torch.device

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.homes: dict[int, torch.nn.Parameter] = {}
        self._coming: dict[int, torch.cuda.Event | None] = {}

    def fill(self, value: torch.Tensor, *, trainable: bool) -> None:
        super().fill(value, trainable=trainable)
        self._move_in()

    def keep(self, parameter: torch.nn.Parameter) -> None:
        super().keep(parameter)
        self._move_in()

    def _move_in(self) -> None:
        for rank, shard in list(self.shards.items()):
            self.device = shard.device
            home = torch.empty_like(shard.detach(), device="cpu", pin_memory=shard.device.type == "cuda")
            self._stand(rank, torch.nn.Parameter(home.copy_(shard.detach()), requires_grad=False))

    def _stand(self, rank: int, shard: torch.nn.Parameter) -> None:
        self.shards[rank] = self.leaves[rank] = self.states[rank] = shard

    def fetch(self, frame: Frame) -> None:
        """Begins to bring it to a rank."""
        rank = frame.rank
        if rank in self.homes:
            return
        home = self.homes[rank] = self.shards[rank]
        with torch.no_grad():
            # A program's copies are operations like others.
            made, self._coming[rank] = (
                (home.detach().to(self.device, copy=True), None)
                if frame.is_tracing
                else lanes(self.device).bring(home.detach())
            )
        self._stand(rank, torch.nn.Parameter(made, requires_grad=False))
        frame.away.append(self)

    def is_used(self, frame: Frame) -> bool:
        """Returns whether a rank has it on the device, and has read it."""
        return frame.rank in self.homes and frame.rank not in self._coming

    def rank_at_work(self, frame: Frame | None) -> int:
        rank = super().rank_at_work(frame)
        if frame is not None:
            self.fetch(frame)
            if rank in self._coming:
                lanes(self.device).arrived(self._coming.pop(rank))
        return rank

    def put_back(self, frame: Frame) -> None:
        """Begins to bring home what a rank has made of it."""
        rank = frame.rank
        home, made = self.homes.pop(rank), self.shards[rank].detach()
        self._stand(rank, home)
        if rank in self._coming:
            lanes(self.device).arrived(self._coming.pop(rank))
        with torch.no_grad():
            if frame.is_tracing:
                home.copy_(made)
            else:
                lanes(self.device).put_back(home.detach(), made)

    def settle(self) -> None:
        """Waits until it is home."""
        lanes(self.device).settle()

    # where no rank is at work -------------------------------------------------------------------------------------

    def whole(self, frame: Frame | None, **how: Any) -> torch.Tensor:
        """A copy on the device, where no rank is at work."""
        found = super().whole(frame, **how)
        return found if frame is not None else found.to(self.device, copy=True)

    def _moved(self, shard: torch.Tensor, *how: Any) -> torch.Tensor:
        return super()._moved(shard.to(self.device), *how)

    @property
    def outside(self) -> outside.Outside:
        if self.of_program is None:
            like = torch.nn.Parameter(
                torch.empty(0, dtype=self.shards[self.world.ranks[0]].dtype, device=self.device), requires_grad=False
            )
            self.of_program = outside.Outside.like(like, self.shardings.stored.shape)
        return self.of_program


def _used(frame: Frame) -> list[HostStorage]:
    return [slot for slot in frame.away if slot.is_used(frame)]


def rests(optimizer: Any) -> bool:
    """Returns whether some of an optimizer's slots rest in host memory."""
    return any(isinstance(getattr(variable, "_storage", None), HostStorage) for variable in optimizer._variables)


def turns(frame: Frame, optimizer: Any, pairs: list[Pair], purpose: str = "") -> Iterator[list[Pair]]:
    """Gives (gradient, variable) in turns; behind each of them the slots that it has read go back.

    Where all slots rest on the device there is one turn.
    """
    if not rests(optimizer):
        yield pairs
        return
    reads = _reads.setdefault(optimizer, {})
    cut = [(turn, (purpose, *(id(variable) for _, variable in turn))) for turn in cut_by_bytes(pairs, TURN_BYTES)]
    earlier = set(_used(frame))
    going: list[HostStorage] = []
    for k, (turn, key) in enumerate(cut):
        for slot in going:
            slot.settle()
        for _, coming in cut[k : k + 2] if not frame.is_tracing else ():
            for slot in reads.get(coming, ()):
                slot.fetch(frame)
        yield turn
        reads[key] = going = [slot for slot in _used(frame) if slot not in earlier]
        frame.put_back(going)


class InTurns(list[Any]):
    """Variables that are gone through in turns."""

    def __init__(self, frame: Frame, optimizer: Any, variables: Sequence[Any]) -> None:
        super().__init__(variables)
        self._frame, self._optimizer = frame, optimizer

    def __iter__(self) -> Iterator[Any]:
        pairs = [(variable.value, variable) for variable in super().__iter__()]
        for turn in turns(self._frame, self._optimizer, pairs, "averages"):
            yield from (variable for _, variable in turn)


def cut_by_bytes(pairs: Sequence[Pair], limit: int) -> Iterator[list[Pair]]:
    """Gives (gradient, variable) in turns of so many bytes of gradients, or of one variable."""
    turn: list[Pair] = []
    nbytes = 0
    for grad, variable in pairs:
        more = grad.numel() * grad.element_size()
        if turn and nbytes + more > limit:
            yield turn
            turn, nbytes = [], 0
        turn.append((grad, variable))
        nbytes += more
    if turn:
        yield turn

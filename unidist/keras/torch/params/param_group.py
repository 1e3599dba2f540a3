"""Unit: variables that are gathered over the data axes in one flat buffer, on one rank.

Source of the method: ZeRO (Rajbhandari et al., arXiv:1910.02054) and PyTorch FSDP (Zhao et al., arXiv:2304.11277);
that a tensor's memory is taken from under it and given back is FSDP's trick too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from unidist import events
from unidist.algebra import Axes
from unidist.keras.torch import outside, transforms
from unidist.keras.torch.params.compute_dtype import without_memory
from unidist.keras.torch.params.flat_buffer import Cut, FlatBuffer, Moving, cut_between
from unidist.keras.torch.params.storage import Storage

if TYPE_CHECKING:
    from unidist.keras.torch.params.param_groups import Fetcher


class Unit:
    """Variables that are gathered together, on one rank.

    Attributes:
        values: what is gathered: the storages' leaves, or values beside them in the dtype of computation.
        is_kept: its leaves are the stored values and are never freed.
        is_lent: somebody may write into the parts. What was gathered before is gathered again.

    Args:
        low: the dtype of computation, for values of their own.
    """

    made = staticmethod(without_memory)
    buffer_of: type[FlatBuffer] = FlatBuffer

    def __init__(
        self, fetcher: Fetcher, axes: Axes, cuts: list[Cut], storages: list[Storage], low: torch.dtype | None = None
    ) -> None:
        rank = fetcher.rank
        self.fetcher = fetcher
        self.storages = storages
        self.is_kept = storages[0].is_kept
        leaves: list[torch.Tensor] = [p.leaves[rank] for p in storages]
        self.is_low = low is not None
        self.values = leaves if low is None else [self.made(leaf.shape, low, leaf.device) for leaf in leaves]
        self.parts = [p.states[rank] if self.is_kept else p.shards[rank] for p in storages]
        self.buffer = self.buffer_of(fetcher.world, rank, axes, cuts, self.values)
        self.nbytes = sum(value.numel() * value.element_size() for value in self.values)
        self.is_here = self.is_kept
        self.users = 0
        self.is_pinned = False
        self._coming: Moving | None = None
        self._rows: list[torch.Tensor] = []  # of what a program has begun to gather
        self._casts: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self.is_lent = False
        self._versions: list[int] = []  # of the parts, when they were gathered

    # moving -------------------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        return any(leaf.requires_grad for leaf in self.values)

    @property
    def is_coming(self) -> bool:
        return self._coming is not None

    def start(self) -> None:
        """Starts to gather. S -> I over the axes; sends (n-1)/n of the unit's bytes."""
        for storage in self.storages:
            outside.reach(storage)
        with torch.no_grad(), events.for_purpose("parameters"):
            self._give_memory(self.buffer.loose)
            # `.data`: what backward saved of them must not look as if it had been changed.
            self._versions = [part._version for part in self.parts]
            self._coming = self.buffer.gather(self.parts, [value.data for value in self.values])
        self.is_here = False

    def finish(self) -> None:
        """Waits for what is under way and puts it where layers read it."""
        if self._coming is None:
            return
        coming, self._coming, self._rows = self._coming, None, []
        coming.wait()
        if coming.buffer is not None:
            with torch.no_grad():
                self._give_memory(self.buffer.packed)
                for k in self.buffer.packed:
                    self.buffer.take(coming.buffer, k, self.values[k].data)
        self.is_here = True

    def bring(self, rows: list[torch.Tensor]) -> None:
        """Takes over what a program has begun to gather: it is under way."""
        self._rows, self._coming = rows, self.buffer.brought(rows, [value.data for value in self.values])
        self.is_here = False

    def rows(self) -> list[torch.Tensor]:
        """Hands over what is under way to a program, which waits for it.

        Where nothing is under way, it is made of the values.
        """
        if self._rows:
            rows, self._rows, self._coming = self._rows, [], None
            return rows
        self.finish()
        with torch.no_grad():
            return self.buffer.rows(self.values)

    def _give_memory(self, numbers: Iterable[int]) -> None:
        for value in [] if self.is_kept else [self.values[k] for k in numbers]:
            value.untyped_storage().resize_(value.numel() * value.element_size())

    def free(self) -> None:
        """Lets the gathered values go. What was saved of them for backward keeps its shape, without memory."""
        self.finish()
        if not self.is_kept and self.is_here:
            for place, value in enumerate(self.values):
                if not value.untyped_storage().resizable():  # NumPy reads it
                    self._leave(place)
            for tensor in (*self.values, *(cast for _, cast in self._casts)):
                tensor.untyped_storage().resize_(0)
            self.is_here = False

    def _leave(self, place: int) -> None:
        """Takes other memory for a value: what it had belongs to others by now."""
        value = self.values[place]
        del self.fetcher.by_memory[value.untyped_storage()._cdata]
        value.data = torch.empty_like(value)
        self.fetcher.by_memory[value.untyped_storage()._cdata] = self

    def note_cast(self, leaf: torch.nn.Parameter, cast: torch.Tensor) -> None:
        """Notes a leaf's value in the dtype of computation, which backward may save instead.

        It is freed and made anew with the leaf.
        """
        if torch.is_grad_enabled() and not transforms.are_at_work():
            self._casts.append((leaf, cast.data))
            self.fetcher.by_memory[cast.untyped_storage()._cdata] = self

    def open_cast(self, memory: int) -> None:
        """Makes a cast's value anew, where it has gone. The leaf is there."""
        for leaf, cast in self._casts:
            storage = cast.untyped_storage()
            if storage._cdata == memory and not storage.size():
                storage.resize_(cast.numel() * cast.element_size())
                cast.copy_(leaf.data)

    def forget_casts(self, of: torch.Tensor | None = None) -> None:
        """Forgets the casts of a leaf, or all."""
        gone = [cast for leaf, cast in self._casts if of is None or leaf is of]
        self._casts = [(leaf, cast) for leaf, cast in self._casts if of is not None and leaf is not of]
        for cast in gone:
            self.fetcher.by_memory.pop(cast.untyped_storage()._cdata, None)

    def write(self, storage: Storage, value: torch.Tensor) -> None:
        """Writes a value into what is gathered of a storage, where it is there.

        What a layer made in low precision of it before, and backward may have saved, stays as it was, as on one device.
        """
        place = self.storages.index(storage)
        held = self.values[place]
        if held.untyped_storage().size():
            self._renew(place)
            self.values[place].data.copy_(value)
            self._versions[place] = self.parts[place]._version

    def _renew(self, place: int) -> None:
        """A value is about to become another."""
        held = self.values[place]
        if not self.is_low:
            self.forget_casts(held)
            return
        self.values[place] = new = torch.empty_like(held)
        del self.fetcher.by_memory[held.untyped_storage()._cdata]
        self.fetcher.by_memory[new.untyped_storage()._cdata] = self

    # reading ------------------------------------------------------------------------------------------------------

    def need(self, storage: Storage) -> None:
        """Fetches the values, of which a storage's is to be read now.

        Read outside of their layer's call, or by torch.func, they stay to the end of the step.
        """
        if self.is_kept:
            self.finish()
            return
        self.fetcher.note(storage, self.is_low)
        if not self.users or transforms.are_at_work():
            self.is_pinned = True
        if self.is_lent and self._versions != [part._version for part in self.parts]:
            self.finish()
            for place in range(len(self.values)) if self.is_here else ():
                self._renew(place)
            self.is_here = False
        if not self.is_here or self.fetcher.last is not self:
            self.fetcher.fetch(self)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    def storage_in(self, memory: int) -> Storage:
        """Returns the storage whose value, or a cast of it, has that memory."""
        for leaf, cast in self._casts:
            if cast.untyped_storage()._cdata == memory:
                memory = leaf.untyped_storage()._cdata
        owners = zip(self.storages, self.values, strict=True)
        return next(storage for storage, value in owners if value.untyped_storage()._cdata == memory)


@dataclass(slots=True)
class Members:
    """The members of a unit that will be.

    Attributes:
        axes: over which they are gathered.
        low: the dtype of computation, where the values are expected to be read in it.
        nbytes: that will be gathered.
    """

    axes: Axes
    low: torch.dtype | None
    cuts: list[Cut] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    nbytes: int = 0

    def add(self, storage: Storage, cut: Cut, leaf: torch.Tensor) -> None:
        self.cuts.append(cut)
        self.storages.append(storage)
        self.nbytes += leaf.numel() * (self.low or leaf.dtype).itemsize


def grouped(
    layers: Iterable[list[Storage]], rank: int, lows: Mapping[int, torch.dtype], most: int, most_kept: int
) -> list[Members]:
    """Units of whole layers; small neighbours share one. Each is of one dtype, one group and one kind.

    Args:
        layers: the storages of each, in the order of the model.
        lows: id of a storage -> the dtype in which its layer is expected to read it, where that is not its own.
        most, most_kept: bytes from which on a unit takes no further layer; of those that are stored whole.
    """
    units: list[Members] = []
    open_units: dict[Any, Members] = {}
    for storages in layers:
        touched = set()
        for storage in storages:
            found = cut_between(
                storage.sharding, storage.shardings.state if storage.is_kept else storage.shardings.stored, rank
            )
            if found is None:
                continue
            axes, cut = found
            low = None if storage.is_kept else lows.get(id(storage))
            key = (axes, storage.shards[rank].dtype, storage.is_kept, low)
            if key not in open_units:
                open_units[key] = Members(axes, low)
                units.append(open_units[key])
            open_units[key].add(storage, cut, storage.leaves[rank])
            touched.add(key)
        for key in touched:
            if open_units[key].nbytes >= (most_kept if key[2] else most):
                del open_units[key]
    return units

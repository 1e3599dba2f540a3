"""Units: variables of neighbouring layers that are gathered over the data axes in one flat buffer.

Variables that are stored as shards (ZeRO-3, FSDP) are fetched when a layer reads them, let go behind it, and fetched
again when backward opens what it saved of them. Variables that are stored whole but updated in parts (ZeRO-1, 2) are
joined again behind the optimizer, while the next step begins.

Source of the method: ZeRO (Rajbhandari et al., arXiv:1910.02054) and PyTorch FSDP (Zhao et al., arXiv:2304.11277);
that a tensor's memory is taken from under it and given back is FSDP's trick too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from unidist import events
from unidist.algebra import Axes
from unidist.keras.calls import Call, Stage
from unidist.keras.torch.calls import around_call
from unidist.keras.torch.context import Frame
from unidist.keras.torch.values import giving, saved
from unidist.keras.torch.values.flat import Cut, FlatBuffer, Moving
from unidist.keras.torch.values.grouping import grouped
from unidist.keras.torch.values.low import LowValue, without_memory
from unidist.keras.torch.values.storage import Storage
from unidist.keras.torch.world import RankWorld
from unidist.planner.fetching import UNIT_BYTES as UNIT_BYTES

# Of those that are joined behind the optimizer: the next step's first layer waits for its own unit alone.
KEPT_UNIT_BYTES = 1 << 20
# What the joining of updated variables may have under way at once.
IN_FLIGHT_BYTES = 100 << 20


class Unit:
    """Variables that are gathered together, on one rank.

    Attributes:
        values: what is gathered: the storages' leaves, or values beside them in the dtype of computation.
        is_kept: its leaves are the stored values and are never freed.
        is_lent: somebody may write into the parts. What was gathered before is gathered again.

    Args:
        low: the dtype of computation, for values of their own.
    """

    def __init__(
        self, fetcher: Fetcher, axes: Axes, cuts: list[Cut], storages: list[Storage], low: torch.dtype | None = None
    ) -> None:
        rank = fetcher.rank
        self.fetcher = fetcher
        self.storages = storages
        self.is_kept = storages[0].is_kept
        leaves: list[torch.Tensor] = [p.leaves[rank] for p in storages]
        self.is_low = low is not None
        self.values = leaves if low is None else [without_memory(leaf.shape, low, leaf.device) for leaf in leaves]
        self.parts = [p.states[rank] if self.is_kept else p.shards[rank] for p in storages]
        self.buffer = FlatBuffer(fetcher.world, rank, axes, cuts, self.values)
        self.nbytes = sum(value.numel() * value.element_size() for value in self.values)
        self.is_here = self.is_kept
        self.users = 0
        self.is_pinned = False
        self._coming: Moving | None = None
        self._casts: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self.is_lent = False
        self._versions: list[int] = []  # of the parts, when they were gathered

    # moving -------------------------------------------------------------------------------------------------------

    @property
    def is_coming(self) -> bool:
        return self._coming is not None

    def start(self) -> None:
        """Starts to gather. S -> I over the axes; sends (n-1)/n of the unit's bytes."""
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
        coming, self._coming = self._coming, None
        coming.wait()
        if coming.buffer is not None:
            with torch.no_grad():
                self._give_memory(self.buffer.packed)
                for k in self.buffer.packed:
                    self.buffer.take(coming.buffer, k, self.values[k].data)
        self.is_here = True

    def _give_memory(self, numbers: Iterable[int]) -> None:
        for value in [] if self.is_kept else [self.values[k] for k in numbers]:
            value.untyped_storage().resize_(value.numel() * value.element_size())

    def free(self) -> None:
        """Lets the gathered values go. What was saved of them for backward keeps its shape, without memory."""
        self.finish()
        if not self.is_kept and self.is_here:
            for tensor in (*self.values, *(cast for _, cast in self._casts)):
                tensor.untyped_storage().resize_(0)
            self.is_here = False

    def note_cast(self, leaf: torch.nn.Parameter, cast: torch.Tensor) -> None:
        """Notes a leaf's value in the dtype of computation, which backward may save instead.

        It is freed and made anew with the leaf.
        """
        if torch.is_grad_enabled() and not saved.is_in_transforms():
            self._casts.append((leaf, cast.data))
            self.fetcher.by_memory[cast.untyped_storage()._cdata] = self

    def open_cast(self, memory: int) -> None:
        """Makes a cast's value anew. The leaf is there."""
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

    def need(self) -> None:
        """Fetches the values, which are to be read now.

        Read outside of their layer's call, or by torch.func, they stay to the end of the step.
        """
        if self.is_kept:
            self.finish()
            return
        if not self.users or saved.is_in_transforms():
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


class Fetcher:
    """One rank's units, in the order of the model's layers; fetches the next one before it is needed.

    Args:
        lows: id of a storage -> the dtype in which its layer is expected to read it, where that is not its own.
    """

    def __init__(
        self, world: RankWorld, rank: int, layers: Iterable[list[Storage]], lows: Mapping[int, torch.dtype]
    ) -> None:
        self.world = world
        self.rank = rank
        self.last: Unit | None = None
        self.units: list[Unit] = []
        self._order: dict[str, list[Unit]] = {}
        self._before: list[Unit] = []
        self._seen: list[Unit] = []
        for one in grouped(layers, rank, lows, UNIT_BYTES, KEPT_UNIT_BYTES):
            unit = Unit(self, one.axes, one.cuts, one.storages)
            self.units.append(unit)
            for storage in one.storages:
                storage.units[rank] = unit
            if one.low is not None:
                self._gather_low(Unit(self, one.axes, one.cuts, one.storages, one.low))
        self.fetched = [unit for unit in self.units if not unit.is_kept]
        self.by_memory = {leaf.untyped_storage()._cdata: u for u in self.fetched for leaf in u.values}
        self._node: Any = None
        self._opened_for_node: list[Unit] = []

    def _gather_low(self, unit: Unit) -> None:
        self.units.append(unit)
        for place, storage in enumerate(unit.storages):
            storage.lows[self.rank] = LowValue(unit, place, storage.leaves[self.rank])

    def close(self) -> None:
        """Lets go of the variables."""
        self.release()
        for unit in self.units:
            unit.finish()
            for storage in unit.storages:
                storage.units.pop(self.rank, None)
                storage.lows.pop(self.rank, None)

    # stored shards ------------------------------------------------------------------------------------------------

    def fetch(self, unit: Unit) -> None:
        """Makes a unit's values be there, frees those that are not in use, and starts the next."""
        with saved.outside_of_transforms():
            self._fetch(unit)

    def _fetch(self, unit: Unit) -> None:
        self._seen.append(unit)
        self.last = unit
        following = self._next()
        staying = (unit, following, *self._opened_for_node)
        for other in self.fetched:
            if not other.users and not other.is_pinned and other not in staying:
                other.free()
        if not unit.is_here:
            if not unit.is_coming:
                unit.start()
            unit.finish()
        if following is not None and not following.is_here and not following.is_coming:
            following.start()

    def _next(self) -> Unit | None:
        """Returns what was needed after this in the last step of the kind; all ranks know it alike."""
        done = len(self._seen)
        if done < len(self._before) and self._before[done - 1] is self._seen[-1]:
            return self._before[done]
        return None

    @contextlib.contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """A step of Keras's trainer. What backward opens is fetched, and nothing is left at the end."""
        if not self.fetched:
            yield
            return
        self._before, self._seen, self.last = self._order.get(kind, []), [], None
        try:
            with torch.autograd.graph.saved_tensors_hooks(saved.alias, self.opened):
                yield
            self._order[kind] = self._seen
        finally:
            self.release()

    def opened(self, kept: torch.Tensor) -> torch.Tensor:
        """Returns what was saved for backward, fetched again."""
        memory = kept.untyped_storage()._cdata
        unit = self.by_memory.get(memory)
        if unit is None:
            return kept
        node = torch._C._current_autograd_node()
        if node is None or node is not self._node:
            self._node, self._opened_for_node = node, []
        # What one node of the graph opens, it computes with together.
        self._opened_for_node.append(unit)
        if not unit.is_here or self.last is not unit:
            self.fetch(unit)
        unit.open_cast(memory)
        return kept

    def release(self) -> None:
        """Frees everything that was fetched."""
        for unit in self.fetched:
            unit.users, unit.is_pinned = 0, False
            unit.free()
            unit.forget_casts()
        self.last = self._node = None
        self._opened_for_node = []

    # values updated in parts --------------------------------------------------------------------------------------

    def join(self, storages: Iterable[Storage]) -> None:
        """Starts to join the updated parts of these variables, in the order of the layers."""
        touched = {id(storage) for storage in storages}
        under_way: list[Unit] = []
        for unit in self.units:
            if unit.is_kept and any(id(storage) in touched for storage in unit.storages):
                unit.finish()
                unit.start()
                under_way.append(unit)
                while sum(u.nbytes for u in under_way) > IN_FLIGHT_BYTES:
                    under_way.pop(0).finish()
        if self.world.is_virtual:
            self.settle()

    def settle(self) -> None:
        """Waits for all that is under way."""
        for unit in self.units:
            if unit.is_kept:
                unit.finish()


def use_in_calls(layer: Any, storages: list[Storage]) -> Callable[[], None]:
    """Keeps the layer's fetched variables in place while it is called. Returns what undoes it."""

    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for unit in {id(u): u for p in storages for u in p.gathered_by(frame.rank)}.values():
                stack.enter_context(unit.in_use())
            return rest(*args, **kwargs)

    def owned(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        return giving.owned(frame, rest(*args, **kwargs))

    undo = [around_call(layer, Stage.FETCHED, inside), around_call(layer, Stage.GIVEN, owned)]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all

"""Units: neighbouring variables are gathered together, in the order in which a step reads them.

Variables that are stored as shards (ZeRO-3, FSDP) are fetched when a layer reads them, let go behind it, and fetched
again when backward opens what it saved of them. Variables that are stored whole but updated in parts (ZeRO-1, 2) are
joined again behind the optimizer, while the next step begins.

Source of the method: ZeRO (Rajbhandari et al., arXiv:1910.02054) and PyTorch FSDP (Zhao et al., arXiv:2304.11277);
that a tensor's memory is taken from under it and given back is FSDP's trick too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from unidist.keras.patching.compat import get_keras_mask, set_keras_mask, tree
from unidist.keras.patching.layer_calls import Call, Stage
from unidist.keras.torch import transforms
from unidist.keras.torch.context import Frame, around_call
from unidist.keras.torch.params import saved
from unidist.keras.torch.params.compute_dtype import LowValue
from unidist.keras.torch.params.param_group import Unit, grouped
from unidist.keras.torch.params.storage import Storage
from unidist.keras.torch.world import RankWorld
from unidist.planner.fetching import UNIT_BYTES as UNIT_BYTES

# Of those that are joined behind the optimizer: the next step's first layer waits for its own unit alone.
KEPT_UNIT_BYTES = 1 << 20
# What the joining of updated variables may have under way at once.
IN_FLIGHT_BYTES = 100 << 20


# A storage that a step reads, and whether in the dtype of computation.
Read = tuple[Storage, bool]


class Fetcher:
    """One rank's units, in the order of the layers; fetches the next one before it is needed.

    Args:
        lows: id of a storage -> the dtype in which its layer is expected to read it, where that is not its own.
        reads: what a training step reads, in its order; None: the first one notes it.
        unit_of: the kind of its units.
    """

    def __init__(
        self,
        world: RankWorld,
        rank: int,
        layers: Iterable[list[Storage]],
        lows: Mapping[int, torch.dtype],
        reads: Sequence[Read] | None = None,
        unit_of: type[Unit] = Unit,
    ) -> None:
        self.world = world
        self.rank = rank
        self.last: Unit | None = None
        self.units: list[Unit] = []
        self._order: dict[str, list[Unit]] = {}
        self._before: list[Unit] = []
        self._seen: list[Unit] = []
        self.reads = reads
        self._noted: list[Read] | None = None
        for one in grouped(layers, rank, lows, UNIT_BYTES, KEPT_UNIT_BYTES):
            unit = unit_of(self, one.axes, one.cuts, one.storages)
            self.units.append(unit)
            if one.low is not None:
                self.units.append(unit_of(self, one.axes, one.cuts, one.storages, one.low))
        self._claim()
        self.fetched = [unit for unit in self.units if not unit.is_kept]
        self.by_memory = {leaf.untyped_storage()._cdata: u for u in self.fetched for leaf in u.values}
        self._node: Any = None
        self._opened_for_node: list[Unit] = []
        if reads is not None:
            units = [
                storage.lows[rank].unit if low and rank in storage.lows else storage.units[rank]
                for storage, low in reads
            ]
            self._order["train"] = [unit for unit, _ in itertools.groupby(units)]

    def follow(self, other: Fetcher) -> None:
        """Takes over the order in which another fetcher's steps have needed the same units."""
        place = {id(unit): k for k, unit in enumerate(other.units)}
        self._order = {kind: [self.units[place[id(unit)]] for unit in units] for kind, units in other._order.items()}

    def note(self, storage: Storage, low: bool) -> None:
        """Notes a read, where the order of reads is to be known."""
        if self._noted is not None:
            self._noted.append((storage, low))

    def _claim(self) -> None:
        """Takes over the variables that another model's fetcher has gathered since: they have one memory."""
        for unit in self.units:
            for place, storage in enumerate(unit.storages):
                if (other := _gathering(storage, self.rank, unit.is_low)) is unit:
                    continue
                if other is not None:
                    other.free()
                if unit.is_low:
                    storage.lows[self.rank] = LowValue(unit, place, storage.leaves[self.rank])
                else:
                    storage.units[self.rank] = unit

    def close(self) -> None:
        """Lets go of the variables."""
        self.release()
        for unit in self.units:
            unit.finish()
            for storage in unit.storages:
                if _gathering(storage, self.rank, unit.is_low) is unit:
                    (storage.lows if unit.is_low else storage.units).pop(self.rank)

    # stored shards ------------------------------------------------------------------------------------------------

    def fetch(self, unit: Unit) -> None:
        """Makes a unit's values be there, frees those that are not in use, and starts the next."""
        with transforms.left():
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
        self._claim()
        if not self.fetched:
            yield
            return
        self._before, self._seen, self.last = self._order.get(kind, []), [], None
        self._noted = [] if kind == "train" and self.reads is None else None
        try:
            with torch.autograd.graph.saved_tensors_hooks(saved.alias, self.opened):
                yield
            self._order[kind] = self._seen
            self.reads = self._noted or self.reads
        finally:
            self._noted = None
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
        if self._noted is not None:
            self.note(unit.storage_in(memory), unit.is_low)
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

    @property
    def lasting(self) -> list[Unit]:
        """The units that are still being joined when a step ends: the last ones, up to IN_FLIGHT_BYTES."""
        found, room = [], IN_FLIGHT_BYTES
        for unit in reversed([u for u in self.units if u.is_kept and u.trains]):
            room -= unit.nbytes
            if room < 0:
                break
            found.append(unit)
        return found[::-1]

    def left(self) -> list[list[torch.Tensor]]:
        """Hands over what is under way of each lasting unit, and waits for all others.

        Of lasting units that have come, there is nothing.
        """
        found = [unit.rows() if unit.is_coming else [] for unit in self.lasting]
        self.settle()
        return found

    def bring(self, left: list[list[torch.Tensor]]) -> None:
        """Takes over what another fetcher's step has left."""
        for unit, rows in zip(self.lasting, left, strict=True):
            if rows:
                unit.bring(rows)

    def settle(self) -> None:
        """Waits for all that is under way."""
        for unit in self.units:
            if unit.is_kept:
                unit.finish()


def _gathering(storage: Storage, rank: int, low: bool) -> Unit | None:
    """The unit that gathers a variable on a rank, in the dtype of computation or in its own."""
    if low:
        return storage.lows[rank].unit if rank in storage.lows else None
    return storage.units.get(rank)


def use_in_calls(layer: Any, storages: list[Storage]) -> Callable[[], None]:
    """Keeps the layer's fetched variables in place while it is called. Returns what undoes it."""

    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for unit in {id(u): u for p in storages for u in p.gathered_by(frame.rank)}.values():
                stack.enter_context(unit.in_use())
            return rest(*args, **kwargs)

    def giving(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        return owned(frame, rest(*args, **kwargs))

    undo = [around_call(layer, Stage.FETCHED, inside), around_call(layer, Stage.GIVEN, giving)]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def owned(frame: Frame, given: Any) -> Any:
    """Returns what a layer gives of fetched weights, in memory that is not let go behind the layer.

    A table of positions is given as it is, as a view of the table.
    """
    fetcher = frame.fetcher
    if fetcher is None or transforms.are_at_work():
        return given

    def own(x: Any) -> Any:
        return _copy(x) if type(x) in _PLAIN and x.untyped_storage()._cdata in fetcher.by_memory else x

    return tree.map_structure(own, given)


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy that repeats in memory no more than the tensor does."""
    once = x
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    copied = once.clone().expand(x.shape)
    if (mask := get_keras_mask(x)) is not None:
        set_keras_mask(copied, mask)
    return copied

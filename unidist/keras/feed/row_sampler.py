"""A torch DataLoader of whose batches this process reads its own rows alone.

Which rows a batch is made of, the batch sampler says before any is read. A collate function of the user's own may look
at several rows (it pads them to the longest, or mixes them), so it is given whole batches.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from unidist.keras.patching.compat import ArrayDataAdapter

# The numbers of a batch's rows -> those of this process's rows.
Own = Callable[[list[int]], list[int]]

# What a loader that reads a process's rows has of the one that reads all. Batches come in their order, whatever
# `in_order` says: processes that train together take the same ones.
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device"),
)


def tells_rows(loader: Any, adapter: Any) -> bool:
    """Returns whether a batch of it is nothing but its rows, whose numbers the batch sampler gives.

    Args:
        adapter: the Keras data adapter that the loader comes from. That of arrays puts no rows together by itself.
    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return False
    if type(loader).__iter__ is not DataLoader.__iter__ or isinstance(loader.dataset, IterableDataset):
        return False
    return loader.collate_fn is default_collate or isinstance(adapter, ArrayDataAdapter)


class Narrowed:
    """A DataLoader's batches, with the rows of this process alone.

    Args:
        loader: one that `tells_rows`.
        own: which rows are this process's. It is asked for each batch, in their order, before that is read.
        place: of this process among those with other rows.
    """

    def __init__(self, loader: Any, own: Own, place: int) -> None:
        self._loader = _twin(loader, place)
        self._own = own

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Yields (batch, rows of the whole batch).

        Where none is this process's, the batch has one too many.

        The loader's iterator is made at once, as Keras makes it: it draws a seed when it is.
        """
        sizes: deque[int] = deque()
        sampler = self._loader.batch_sampler
        sampler.own, sampler.sizes = self._own, sizes
        return ((batch, sizes.popleft()) for batch in iter(self._loader))


class _OwnRows(Sampler[list[int]]):
    """A batch sampler's batches, cut to this process's rows."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.own: Own
        self.sizes: deque[int]

    def __iter__(self) -> Iterator[list[int]]:
        # Those of this pass, also when another one has begun.
        own, sizes = self.own, self.sizes
        return self._pass(own, sizes)

    def _pass(self, own: Own, sizes: deque[int]) -> Iterator[list[int]]:
        for batch in self.batches:
            indices = list(batch)
            mine = own(indices)
            sizes.append(len(indices))
            # Never an empty list, which collate functions refuse.
            yield mine or indices[:1]

    def __len__(self) -> int:
        return len(self.batches)


# Workers that a loader keeps from epoch to epoch are those of its twin.
_keeping: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _twin(loader: Any, place: int) -> Any:
    found = _keeping.get(loader)
    if found is None:
        init = _Apart(place, loader.worker_init_fn) if loader.num_workers and place else loader.worker_init_fn
        kept = {name: getattr(loader, name) for name in _KEPT}
        found = DataLoader(loader.dataset, batch_sampler=_OwnRows(loader.batch_sampler), worker_init_fn=init, **kept)
        if loader.persistent_workers:
            _keeping[loader] = found
    return found


@dataclass(frozen=True)
class _Apart:
    """Gives a worker other random numbers, at its start, than those that read other rows of its batches.

    Attributes:
        given: the user's own function, which comes behind.
    """

    place: int
    given: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        # Mixed, since the seeds of workers follow each other and torch looks at a seed's last 32 bits alone.
        seed = int(np.random.SeedSequence((torch.initial_seed(), self.place)).generate_state(1, np.uint64)[0])
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        if self.given is not None:
            self.given(worker)

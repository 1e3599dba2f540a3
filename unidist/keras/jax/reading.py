"""Reads in several JAX processes: each its own rows of every batch where the data says which.

Where it does not, each reads the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from unidist.keras import active_distribution
from unidist.keras.consistency.processes import Processes
from unidist.keras.feed.batch_digest import Views
from unidist.keras.feed.lockstep import Meeting, Part, rowwise
from unidist.keras.jax import data, layouts, placing, processes
from unidist.keras.patching.compat import ArrayDataAdapter, TorchDataLoaderAdapter, array_slicing, tree

_meeting = Meeting(data.rows_of_all, processes.ranks_of)


@dataclass(frozen=True)
class Share:
    """Says which rows of a batch the devices of this process hold.

    Attributes:
        counts: how many every process holds.
        rows: the numbers of this process's.
        total: rows of the whole batch.
    """

    counts: tuple[int, ...]
    rows: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, total: int, distribution: Any) -> Share:
        return _share(total, layouts.of_batch((total,), distribution))

    def take(self, indices: Any) -> Any:
        """This process's part of what stands for the rows of a batch: numbers, or a slice."""
        if not isinstance(indices, slice):
            return indices[list(self.rows)]
        rows = np.asarray(self.rows, np.int64) + indices.start
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return rows

    def parts(self, batch: Any) -> Any:
        """The batch, of this process's rows and perhaps more behind them, as parts of the whole."""
        return rowwise(lambda array: Part(array[: len(self.rows)], self.counts, self.total), batch)


@functools.lru_cache(maxsize=64)
def _share(total: int, sharding: Any) -> Share:
    places, parts = data.rows_by_process(sharding), layouts.parts_of_dim(sharding, 0)
    unit = -(-total // parts)
    held = [[range(min(k * unit, total), min((k + 1) * unit, total)) for k in own] for own in places]
    own = tuple(row for rows in held[jax.process_index()] for row in rows)
    return Share(tuple(sum(map(len, rows)) for rows in held), own, total)


class _Around:
    """A Keras data adapter around another."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


class LockstepAdapter(_Around):
    """A Keras data adapter for data that each process was given its own rows of."""

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self.num_batches = _meeting.batches(adapter.num_batches)

    def get_jax_iterator(self) -> Any:
        return _meeting.parts(self._adapter.get_jax_iterator())


class SameAdapter(_Around):
    """A Keras data adapter for data that every process is given whole.

    Args:
        several: the processes, which must see the same.
        distribution: by which the rows of a batch are cut.
    """

    def __init__(self, adapter: Any, several: Processes, distribution: Any) -> None:
        super().__init__(adapter)
        self._processes = several
        self._distribution = distribution

    def get_jax_iterator(self) -> Any:
        views = Views(self._adapter, self._processes)
        if self._are_cut():
            if isinstance(self._adapter, ArrayDataAdapter) and _is_dense(self._adapter._inputs):
                return self._of_arrays(views)
            if self._tells_rows():
                return self._of_loader(views)
        return _whole(self._adapter.get_jax_iterator(), views)

    def _are_cut(self) -> bool:
        """Returns whether some process does not hold all rows, and each holds some."""
        sharding = layouts.of_batch((1,), self._distribution)
        held = data.rows_by_process(sharding)
        return all(held) and any(len(own) < layouts.parts_of_dim(sharding, 0) for own in held)

    def _tells_rows(self) -> bool:
        if not isinstance(self._adapter, TorchDataLoaderAdapter):
            return False
        # Whoever gives Keras a DataLoader has torch.
        from unidist.keras.feed.row_sampler import tells_rows

        return tells_rows(self._adapter._dataloader, self._adapter)

    def _of_arrays(self, views: Views) -> Iterator[Any]:
        """Compares whole batches where batches are compared: to read these few costs little."""
        inputs = array_slicing.convert_to_sliceable(self._adapter._inputs, target_backend="jax")
        # Keras asks each array of a batch for the same rows.
        for asked in self._adapter._get_iterator(_Asked, inputs):
            indices = tree.flatten(asked)[0].indices
            views.check_read(functools.partial(_each, _Asked.read, asked))
            share = Share.of(_length(indices), self._distribution)
            own = share.take(indices)
            yield share.parts(_each(functools.partial(_Asked.read, indices=own), asked))

    def _of_loader(self, views: Views) -> Iterator[Any]:
        from unidist.keras.feed.row_sampler import Narrowed

        def own(indices: list[int]) -> list[int]:
            views.check(np.asarray(indices))
            return [indices[k] for k in Share.of(len(indices), self._distribution).rows]

        # What a dataset draws for its own rows has parted the processes' random states.
        self._processes.align_seeds()
        places = data.rows_by_process(layouts.of_batch((1,), self._distribution))
        for batch, total in Narrowed(self._adapter._dataloader, own, places[jax.process_index()][0]):
            yield Share.of(total, self._distribution).parts(tuple(_each(_numpy, batch)))


@dataclass(frozen=True)
class _Asked:
    """The part of an array that Keras would read for a batch."""

    sliceable: Any
    indices: Any

    def read(self, indices: Any = None) -> Any:
        return self.sliceable.convert_to_jax_compatible(self.sliceable[self.indices if indices is None else indices])


def _length(indices: Any) -> int:
    return int(indices.stop - indices.start) if isinstance(indices, slice) else len(indices)


def _each(function: Callable[[Any], Any], batch: Any) -> Any:
    return tree.map_structure(function, batch, none_is_leaf=False)


def _numpy(tensor: Any) -> Any:
    return np.asarray(tensor.cpu())


def _is_dense(inputs: Any) -> bool:
    return all(x is None or isinstance(x, np.ndarray | jax.Array) for x in tree.flatten(inputs))


def _whole(batches: Iterable[Any], views: Views) -> Iterator[Any]:
    for batch in batches:
        views.check(batch)
        yield batch


def adapting(original: Any) -> Any:
    """Wraps Keras's get_data_adapter: reads as in one process; a step then places each process's rows.

    Keras itself takes only tf.data in several processes, and cuts it by whole batches.
    """

    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        distribution = placing.current()
        if distribution is None:
            return original(*args, **kwargs)
        apart = processes.several() and not distribution.auto_shard_dataset
        with active_distribution.active(None), _meeting.told_to_all() if apart else contextlib.nullcontext():
            adapter = original(*args, **kwargs)
        if apart:
            return LockstepAdapter(adapter)
        several = processes.processes()
        return adapter if several is None else SameAdapter(adapter, several, distribution)

    return get_data_adapter

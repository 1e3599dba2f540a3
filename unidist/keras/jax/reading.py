"""Reads in several JAX processes: each its own rows of every batch where the data says which.

Where it does not, each reads the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from unidist.keras import active_distribution
from unidist.keras.consistency.processes import Processes
from unidist.keras.feed.adapters import Around, in_step
from unidist.keras.feed.batch_digest import Views
from unidist.keras.feed.lockstep import Meeting
from unidist.keras.feed.row_plan import Share
from unidist.keras.jax import data, placing, processes
from unidist.keras.patching.compat import ArrayDataAdapter, TorchDataLoaderAdapter, array_slicing, tree
from unidist.keras.patching.patches import calling


class _Reader:
    """Reads data that every process is given whole. Begins an epoch when it is called.

    Args:
        adapter: Keras's, of the data.
        several: the processes, which must see the same.
        distribution: by which the rows of a batch are cut.
    """

    def __init__(self, adapter: Any, several: Processes, distribution: Any) -> None:
        self._adapter = adapter
        self._processes = several
        self._plan = data.row_plan(distribution)

    def __call__(self) -> Iterator[Any]:
        views = Views(self._adapter, self._processes)
        if self._are_cut():
            if isinstance(self._adapter, ArrayDataAdapter) and _is_dense(self._adapter._inputs):
                return self._of_arrays(views)
            if self._tells_rows():
                return self._of_loader(views)
        return views.checked(self._adapter.get_jax_iterator())

    def _are_cut(self) -> bool:
        """Returns whether some process does not hold all rows, and each holds some."""
        held = self._plan.held
        return all(held) and any(len(own) < self._plan.parts for own in held)

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
            share = self._share(_length(indices))
            own = share.take(indices)
            yield share.parts(_each(functools.partial(_Asked.read, indices=own), asked))

    def _of_loader(self, views: Views) -> Iterator[Any]:
        from unidist.keras.feed.row_sampler import Narrowed

        def own(indices: list[int]) -> list[int]:
            views.check(np.asarray(indices))
            return self._share(len(indices)).take(indices)  # type: ignore[no-any-return]

        # What a dataset draws for its own rows has parted the processes' random states.
        self._processes.align_seeds()
        for batch, total in Narrowed(self._adapter._dataloader, own, self._plan.held[jax.process_index()][0]):
            yield self._share(total).parts(tuple(_each(_numpy, batch)))

    def _share(self, total: int) -> Share:
        return self._plan.share(total, jax.process_index())


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


@calling
def adapting(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps Keras's get_data_adapter: reads as in one process; a step then places each process's rows.

    Keras itself takes only tf.data in several processes, and cuts it by whole batches.
    """
    distribution = placing.current()
    if distribution is None:
        return original(*args, **kwargs)
    several = processes.processes()
    meeting = None if several is None or distribution.auto_shard_dataset else Meeting(several)
    with active_distribution.active(None), meeting.told_to_all() if meeting else contextlib.nullcontext():
        adapter = original(*args, **kwargs)
    if meeting is not None:
        return in_step(adapter, adapter.get_jax_iterator, meeting)
    return adapter if several is None else Around(adapter, _Reader(adapter, several, distribution))

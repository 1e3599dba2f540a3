"""Batches: placed on the mesh, padded where rows do not divide, cut to the true rows in the step.

A batch of 10 rows on 4 devices is padded to 12 and sharded; the compiled step first takes rows 0 to 9 of the global
array. The compiler then works on uneven shards, so that every mean, statistic and metric is that of the true rows. On a
mesh of several axes it is given the rows whole.

In several processes each reads its own rows of every batch where the data says which. Where it does not, each reads the
whole batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import NamedSharding

from unidist.keras import active_distribution
from unidist.keras.consistency.processes import Processes
from unidist.keras.feed.batch_digest import Views
from unidist.keras.feed.lockstep import Around, Meeting, Part, in_step
from unidist.keras.feed.row_plan import RowPlan, Share
from unidist.keras.jax import layouts, placing, processes
from unidist.keras.patching.compat import (
    ArrayDataAdapter,
    TorchDataLoaderAdapter,
    array_slicing,
    tree,
)
from unidist.keras.patching.patches import calling

Segments = tuple[tuple[int, int], ...]


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["segments"])
@dataclass(frozen=True)
class Padded:
    """A sharded array whose true rows are the segments (start, stop) of its first dim, in order."""

    array: Any
    segments: Segments

    def cut(self) -> Any:
        parts = [self.array[start:stop] for start, stop in self.segments]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def cut(tree: Any) -> Any:
    """The tree with every padded array cut to its true rows."""
    return jax.tree.map(lambda leaf: leaf.cut() if is_padded_leaf(leaf) else leaf, tree, is_leaf=is_padded_leaf)


def is_padded_leaf(leaf: Any) -> bool:
    return isinstance(leaf, Padded)


def is_padded(tree: Any) -> bool:
    return any(map(is_padded_leaf, jax.tree.leaves(tree, is_leaf=is_padded_leaf)))


def described(leaf: Any) -> str:
    """A placed array's dtype and true shape, and where its rows are."""
    if not isinstance(leaf, Padded):
        return f"{leaf.dtype} {leaf.shape}"
    rows = sum(stop - start for start, stop in leaf.segments)
    places = ", ".join(f"{start}-{stop}" for start, stop in leaf.segments)
    return f"{leaf.array.dtype} {(rows, *leaf.array.shape[1:])} in {places} of {leaf.array.shape[0]}"


def place(batch: Any, distribution: Any) -> Any:
    """The batch on the distribution's mesh. What is there already stays.

    Args:
        batch: a tree of arrays. The same global batch on every process where the distribution's
            `auto_shard_dataset` is set, else each process's own rows of it.
        distribution: a Keras Distribution.

    Raises:
        LayoutError: another dim than the first does not divide over its axes.
    """
    return jax.tree.map(partial(_place_leaf, distribution), batch, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Part, Padded, JAXSparse))


def _place_leaf(distribution: Any, value: Any) -> Any:
    if isinstance(value, Padded) or _is_global(value, distribution):
        return value
    if isinstance(value, JAXSparse):
        return jax.device_put(value, layouts.replicated(distribution))
    if isinstance(value, Part):
        return _place_part(value, distribution)
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.ndim == 0:
        return processes.put(array, layouts.replicated(distribution))
    if processes.several() and not distribution.auto_shard_dataset:
        return _place_part(Part(array, processes.of_all(array.shape[0], "batch sizes")), distribution)
    return _place_whole(array, distribution)


def _is_global(value: Any, distribution: Any) -> bool:
    if not isinstance(value, jax.Array):
        return False
    devices = value.sharding.device_set
    return len(devices) > 1 and devices == set(distribution.device_mesh.backend_mesh.devices.flat)


def _place_whole(array: Any, distribution: Any) -> Any:
    rows = array.shape[0]
    sharding = layouts.of_batch(array, distribution)
    missing = -rows % layouts.parts_of_dim(sharding, 0)
    if not missing:
        return processes.put(array, sharding)
    return Padded(processes.put(_padded(array, missing), sharding), ((0, rows),))


def _padded(array: Any, missing: int) -> Any:
    concatenate = jnp.concatenate if isinstance(array, jax.Array) else np.concatenate
    zeros = jnp.zeros if isinstance(array, jax.Array) else np.zeros
    return concatenate([array, zeros((missing, *array.shape[1:]), array.dtype)])


def _place_part(part: Part, distribution: Any) -> Any:
    """The global array, made of each process's own rows."""
    array = np.asarray(part.array)
    sharding = layouts.of_batch(array, distribution)
    plan = _row_plan(sharding)
    units = len(plan.held[jax.process_index()])
    per_unit = -(-max(part.counts) // units)
    if part.total is not None:
        per_unit = -(-part.total // plan.parts)
    missing = per_unit * units - array.shape[0]
    held = _padded(array, missing) if missing else array
    total = plan.parts * per_unit
    shape = (total, *array.shape[1:])
    placed = jax.make_array_from_process_local_data(sharding, held, shape)
    segments = _segments(plan.held, part.counts, per_unit)
    return placed if segments == ((0, total),) else Padded(placed, segments)


def row_plan(distribution: Any) -> RowPlan:
    """Returns which rows of a batch each process's devices hold."""
    return _row_plan(layouts.of_rows((1,), distribution))


@lru_cache(maxsize=64)
def _row_plan(sharding: NamedSharding) -> RowPlan:
    parts = layouts.parts_of_dim(sharding, 0)
    held: list[set[int]] = [set() for _ in range(jax.process_count())]
    first: Any = layouts.named(sharding.mesh, *sharding.spec[:1])
    for device, (rows,) in first.devices_indices_map((parts,)).items():
        held[device.process_index].update(range(*rows.indices(parts)))
    return RowPlan(tuple(tuple(sorted(own)) for own in held), parts)


def _segments(held: tuple[tuple[int, ...], ...], counts: tuple[int, ...], per_unit: int) -> Segments:
    """Returns the true rows where process p filled the first counts[p] rows of its parts, each part once."""
    filled: dict[int, int] = {}
    for own, count in zip(held, counts, strict=True):
        for place, unit in enumerate(own):
            filled[unit] = min(max(count - place * per_unit, 0), per_unit)
    segments: list[tuple[int, int]] = []
    for unit in sorted(filled):
        start, stop = unit * per_unit, unit * per_unit + filled[unit]
        if segments and segments[-1][1] == start:
            segments[-1] = (segments[-1][0], stop)
        elif stop > start:
            segments.append((start, stop))
    return tuple(segments)


def replicate(tree: Any, distribution: Any) -> Any:
    """Makes every array of the tree whole on every device.

    Inside a compiled step that is a constraint, outside it a transfer.
    """
    return jax.tree.map(partial(_replicate_leaf, layouts.replicated(distribution)), tree)


def _replicate_leaf(sharding: NamedSharding, value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(value, sharding)
    if isinstance(value, jax.Array) and not value.is_fully_addressable and not value.is_fully_replicated:
        return jax.jit(_same, out_shardings=sharding)(value)
    return value


def _same(value: Any) -> Any:
    return value


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
        self._plan = row_plan(distribution)

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

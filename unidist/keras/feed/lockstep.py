"""Batches where a process has its own rows alone; and data where each process was given its own part.

All go through such data in step (auto_shard_dataset=False).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import KerasTensor, tree
from keras.backend import standardize_dtype

from unidist.backends.protocol import Array
from unidist.errors import DesyncError, LayoutError
from unidist.keras.consistency.processes import Processes
from unidist.keras.feed.batch_digest import Views

# In place of a number of rows or batches: not known; this process was given no batch at all; its data raised.
_UNKNOWN = _NONE = -1
_RAISED = -2


@dataclass(frozen=True)
class Part:
    """This process's rows of a global batch, and how many rows every process has of it.

    Looks like the array to Keras, which asks shape and dtype to build the model.

    Attributes:
        total: rows of the global batch, where that is known without asking; processes may hold the same rows.
    """

    array: Any
    counts: tuple[int, ...]
    total: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> Any:
        return self.array.dtype


@dataclass(frozen=True)
class Meeting:
    """Says how the processes of a world agree on their data.

    Attributes:
        processes: of the world, several.
    """

    processes: Processes

    def of_all(self, number: int) -> tuple[int, ...]:
        """Every process's number, by process. A collective of the world."""
        return self.processes.of_all(number, "batch sizes")

    @contextlib.contextmanager
    def told_to_all(self) -> Iterator[None]:
        """Puts what is raised inside in place of the number for which the other processes wait."""
        try:
            yield
        except BaseException:
            self.of_all(_RAISED)
            raise

    def batches(self, number: int | None) -> int | None:
        """The number of batches of the longest part; None where some process does not know it. A collective.

        Raises:
            DesyncError: the data of some process raised.
        """
        counts = self.of_all(_UNKNOWN if number is None else number)
        self.tell_apart(counts, _RAISED, "raised an error")
        return None if _UNKNOWN in counts else max(counts)

    def parts(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields a process's batches, of Parts. Each is a collective.

        All take as many as the longest part has, and who has no rows left takes part with none.

        Raises:
            DesyncError: the data of some process raised, or some were given none at all.
        """
        iterator, last = iter(batches), None
        while True:
            with self.told_to_all():
                batch = next(iterator, None)
                rows = _NONE if batch is None and last is None else 0 if batch is None else row_count(batch)
            counts = self._agreed(rows)
            if not any(counts):
                return
            last = rowwise(lambda array: array[:0], last) if batch is None else batch
            yield as_parts(last, counts)

    def _agreed(self, rows: int) -> tuple[int, ...]:
        counts = self.of_all(rows)
        if set(counts) == {_NONE}:
            return (0,)
        self.tell_apart(counts, _RAISED, "raised an error")
        self.tell_apart(counts, _NONE, "holds no batch, while others' does")
        return counts

    def tell_apart(self, counts: tuple[int, ...], sign: int, how: str) -> None:
        """Raises DesyncError where the number of some process is the sign."""
        apart = [process for process, count in enumerate(counts) if count == sign]
        if apart:
            raise DesyncError(
                f"auto_shard_dataset=False: the data of processes {apart} of {len(counts)} {how}. Every process must "
                "be given at least one batch, and come to the end of its data",
                ranks=tuple(rank for process in apart for rank in self.processes.ranks[process]),
                collective="batch sizes",
            )


def row_count(batch: Any) -> int:
    """Rows of the first array of a batch that has rows. Raises LayoutError: there is none."""
    for leaf in tree.flatten(batch):
        if _has_rows(leaf):
            return int(leaf.shape[0])
    raise LayoutError("auto_shard_dataset=False: a batch must have rows, found none")


def as_parts(batch: Any, counts: tuple[int, ...]) -> Any:
    """The batch with a Part for each array that has rows."""
    return rowwise(lambda array: Part(array, counts), batch)


def to_build(steps: Iterable[Any], rows_of: Callable[[tuple[int, ...]], int]) -> Iterator[Any]:
    """Yields an epoch's steps for Keras's symbolic build, which reads shapes and dtypes of the first one."""
    for *ends, given in steps:
        yield (*ends, [as_symbols(given[0] if isinstance(given, list | tuple) else next(given), rows_of)])


def as_symbols(batch: Any, rows_of: Callable[[tuple[int, ...]], int]) -> Any:
    """Returns what Keras traces losses and metrics with.

    Parts have the rows of all processes, as they will have in a step.

    Args:
        rows_of: the rows of the global batch, of which each process has so many.
    """

    def symbol(leaf: Any) -> Any:
        if not isinstance(leaf, Part):
            return leaf
        return symbol_of(leaf, leaf.total if leaf.total is not None else rows_of(leaf.counts))

    return tree.map_structure(symbol, batch)


def symbol_of(array: Any, rows: int) -> KerasTensor:
    """Returns what stands for an array in Keras's symbolic build, with another number of rows."""
    return KerasTensor((rows, *array.shape[1:]), standardize_dtype(array.dtype))


def rowwise(function: Callable[[Array], Any], batch: Any) -> Any:
    """The batch with function(array) for each array that has rows, which is given in NumPy."""
    return tree.map_structure(lambda leaf: function(np.asarray(leaf)) if _has_rows(leaf) else leaf, batch)


def _has_rows(leaf: Any) -> bool:
    return hasattr(leaf, "__array__") and len(leaf.shape) > 0


class Around:
    """A Keras data adapter with other batches. On TensorFlow it is the dataset too.

    Args:
        adapter: Keras's, which says all else.
        read: begins an epoch and returns its batches.

    Attributes:
        element_spec: TensorFlow's specs of a batch, where a tf.data.Dataset is read.
    """

    element_spec: Any = None

    def __init__(self, adapter: Any, read: Callable[[], Iterator[Any]]) -> None:
        self._adapter = adapter
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def __iter__(self) -> Iterator[Any]:
        return self._read()

    def get_jax_iterator(self) -> Iterator[Any]:
        return self._read()

    def get_tf_dataset(self) -> Around:
        return self


def same(adapter: Any, read: Callable[[], Iterable[Any]], processes: Processes) -> Around:
    """Returns an adapter for data that every process reads whole: all must see the same."""
    # An iterator is made at once, as Keras makes it, who makes one more than is read: a shuffle draws when one is made.
    return Around(adapter, lambda: Views(adapter, processes).checked(iter(read())))


def in_step(adapter: Any, read: Callable[[], Iterable[Any]], meeting: Meeting) -> Around:
    """Returns an adapter for data that each process was given its own part of. A collective.

    Its batches are of Parts, and all processes take as many.
    """
    found: Any = Around(adapter, lambda: meeting.parts(read()))
    found.num_batches = meeting.batches(adapter.num_batches)
    return found  # type: ignore[no-any-return]

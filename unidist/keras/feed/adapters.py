"""Keras's data adapters in several processes: each has its own part of the data, or all see the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from unidist.keras.consistency.processes import Processes
from unidist.keras.feed.batch_digest import Views
from unidist.keras.feed.lockstep import Meeting


class Around:
    """A Keras data adapter with other batches. On TensorFlow it is the dataset too.

    Args:
        adapter: Keras's, which says all else.
        read: begins an epoch and returns its batches.
    """

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
    return Around(adapter, lambda: Views(adapter, processes).checked(read()))


def in_step(adapter: Any, read: Callable[[], Iterable[Any]], meeting: Meeting) -> Around:
    """Returns an adapter for data that each process was given its own part of. A collective.

    Its batches are of Parts, and all processes take as many.
    """
    found: Any = Around(adapter, lambda: meeting.parts(read()))
    found.num_batches = meeting.batches(adapter.num_batches)
    return found  # type: ignore[no-any-return]

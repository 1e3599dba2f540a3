"""Keras's data adapters on TensorFlow, which give its trainer tf.data datasets: with others instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unidist.keras.consistency.processes import Processes
from unidist.keras.feed.batch_digest import Views


class Around:
    """A Keras data adapter whose batches are those that this gives.

    Attributes:
        adapter, dataset: Keras's, and its dataset.
    """

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.dataset = adapter.get_tf_dataset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    def get_tf_dataset(self) -> Around:
        return self


class Same(Around):
    """Data that every process reads whole: all must see the same."""

    def __init__(self, adapter: Any, processes: Processes) -> None:
        super().__init__(adapter)
        self._processes = processes

    def __iter__(self) -> Iterator[Any]:
        views = Views(self.adapter, self._processes)
        for batch in self.dataset:
            views.check(batch)
            yield batch

"""Finds the sources of a fit's data, and how batches of it are drawn without being read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from unidist.keras.patching.compat import backend

# Datasets of TensorFlow whose iterator draws from its shuffles when it is made, and never later.
DRAW_WHEN_MADE = {
    *("_TensorSliceDataset", "_TensorDataset", "_RangeDataset", "_MapDataset", "_ParallelMapDataset", "_BatchDataset"),
    *("_ParallelBatchDataset", "_PaddedBatchDataset", "_PrefetchDataset", "_ShuffleDataset", "_TakeDataset"),
    *("_SkipDataset", "_OptionsDataset", "_FilterDataset", "_ZipDataset", "TFRecordDatasetV2", "_TFRecordDataset"),
}


def innermost(adapter: Any) -> Any:
    """Keras's own data adapter, which an engine may have put another around."""
    while (inner := vars(adapter).get("adapter", vars(adapter).get("_adapter"))) is not None:
        adapter = inner
    return adapter


def tf_dataset_of(adapter: Any) -> Any:
    """The tf.data.Dataset that an adapter was given, or None."""
    found = vars(innermost(adapter)).get("_dataset")
    return found if type(found).__module__.startswith("tensorflow.") else None


def inside(dataset: Any) -> Iterator[Any]:
    yield dataset
    for one in dataset._inputs():
        yield from inside(one)


def sources_of(adapter: Any) -> list[tuple[str, Any]]:
    """Returns what may hold numbers of its own on which the data's order hangs: (name, object)."""
    adapter = innermost(adapter)
    found = {"adapter": adapter, "dataset": vars(adapter).get("py_dataset")}
    if (loader := vars(adapter).get("_dataloader")) is not None:
        found |= {"loader": loader, "dataset": loader.dataset, "batch sampler": loader.batch_sampler}
        found |= {"sampler": loader.sampler, "inner sampler": getattr(loader.batch_sampler, "sampler", None)}
    once = {id(one): (name, one) for name, one in found.items() if hasattr(one, "__dict__")}
    return list(once.values())


def skip(batches: Any) -> None:
    """Draws a batch. A torch DataLoader draws the rows that it would have read."""
    loads = type(batches).__name__ == "_SingleProcessDataLoaderIter"
    if loads and type(batches._dataset_fetcher).__name__ == "_MapDatasetFetcher":
        batches._next_index()
    else:
        next(batches)


def follow_stacks(adapter: Any, note: Callable[[int], None]) -> None:
    """Notes the stacks of batches that an adapter gives.

    It may give them from Keras 3.16 on, with Keras on JAX and steps_per_execution.
    """
    original = getattr(adapter, "get_jax_iterator", None)
    if original is None:
        return

    def get_jax_iterator(*args: Any, **kwargs: Any) -> Any:
        note(kwargs.get("super_batch") or 1)
        return original(*args, **kwargs)

    adapter.get_jax_iterator = get_jax_iterator


def draws_in_steps(batches: Any) -> bool:
    """Returns whether it is an iterator of TensorFlow, from which a compiled step draws by itself."""
    return type(batches).__module__.startswith("tensorflow.")


def reads_in_step(adapter: Any) -> bool:
    """Returns whether a batch is read when it is asked for, and not before.

    Then what is read has drawn what was trained on.
    """
    adapter = innermost(adapter)
    workers = getattr(vars(adapter).get("_dataloader"), "num_workers", 0)
    return backend.backend() != "tensorflow" and vars(adapter).get("enqueuer") is None and not workers


@contextlib.contextmanager
def unread(adapter: Any) -> Iterator[None]:
    """While this is entered a PyDataset's batches are counted, and not read, where nobody reads ahead."""
    adapter = innermost(adapter)
    dataset = vars(adapter).get("py_dataset")
    if dataset is None or not reads_in_step(adapter):
        yield
        return
    adapter.py_dataset = _Unread(dataset)
    try:
        yield
    finally:
        adapter.py_dataset = dataset


class _Unread:
    """A PyDataset that gives nothing."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __getitem__(self, index: int) -> Any:
        return (np.zeros((1, 1), "float32"),)

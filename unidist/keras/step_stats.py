"""Figures of a step: its rows, what it sent, how long it waited for others, and its most memory."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import keras

from unidist import events
from unidist.backends import registry
from unidist.events import Event
from unidist.flight.reading import waited
from unidist.flight.recorder import recorder
from unidist.keras import driver
from unidist.keras.checkpoint.sources import innermost
from unidist.keras.feed.lockstep import Part
from unidist.keras.patching.compat import tree

# rows -----------------------------------------------------------------------------------------------------------------


class Rows:
    """Counts the rows, and the tokens, of all processes that the steps of a fit take.

    Batches are counted where they are drawn; on TensorFlow, where a compiled step draws them, their size is known
    before or not at all.

    Args:
        iterator: Keras's EpochIterator of the training data, which goes on through this.
        processes: which have data of their own; 1 where all see the same.
    """

    def __init__(self, iterator: Any, processes: int) -> None:
        self._iterator, self._processes = iterator, processes
        self._make_steps = iterator._enumerate_iterator
        vars(iterator)["_enumerate_iterator"] = self._steps
        self._rows: int | None = 0
        self._length: int | None = None

    def take(self) -> tuple[int | None, int | None]:
        """(rows, tokens) since it was last asked; None: not known, or no tokens."""
        rows, self._rows = self._rows, 0
        return rows, None if rows is None or self._length is None else rows * self._length

    def _steps(self) -> Iterator[Any]:
        is_drawn_inside = keras.config.backend() == "tensorflow"
        for begin, end, batches in self._make_steps():
            if is_drawn_inside:
                self._foresee(begin, end)
            yield begin, end, batches if is_drawn_inside else self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._count(batch)
            yield batch

    def _count(self, batch: Any) -> None:
        rows, self._length = _extent(batch)
        # A process that reads its own rows alone knows how many all have.
        reader = getattr(self._iterator, "_unidist_reader", None)
        if reader is not None and reader.rows is not None:
            rows = reader.rows.total
        elif (total := _total(batch)) is not None:
            rows = total
        elif rows is not None:
            rows *= self._processes
        self._add(rows)

    def _foresee(self, begin: int, end: int) -> None:
        adapter, last = innermost(self._iterator.data_adapter), self._iterator.num_batches
        dataset = getattr(self._iterator, "_distributed_dataset", None)
        spec = getattr(getattr(dataset, "dataset", dataset), "element_spec", None)
        of_spec, self._length = (None, None) if spec is None else _extent(spec)
        size, rest = adapter.batch_size or of_spec, adapter.partial_batch_size
        for step in range(begin, end + 1 if last is None else min(end + 1, last)):
            rows = rest if rest and last is not None and step == last - 1 else size
            self._add(None if rows is None else rows * self._processes)

    def _add(self, rows: int | None) -> None:
        self._rows = None if rows is None or self._rows is None else self._rows + rows


def _extent(batch: Any) -> tuple[int | None, int | None]:
    """Returns (rows, length of sequences) of a batch.

    The length is known where an input is of whole numbers, and has two dims.
    """
    inputs = tree.flatten(batch[0] if isinstance(batch, tuple | list) else batch)
    shaped = [leaf for leaf in inputs if leaf is not None and len(leaf.shape)]
    sequences = [leaf for leaf in shaped if len(leaf.shape) == 2 and "int" in str(leaf.dtype)]
    return (shaped[0].shape[0] if shaped else None), (sequences[0].shape[1] if sequences else None)


def _total(batch: Any) -> int | None:
    return next((leaf.total for leaf in tree.flatten(batch) if isinstance(leaf, Part)), None)


# what is sent, and waited for -----------------------------------------------------------------------------------------


def _runs_programs() -> bool:
    found = driver.current()
    return found is not None and found.RUNS_PROGRAMS


class Sent:
    """Counts the bytes that a process has sent in steps.

    Where a step is a compiled program, it is asked once for each number of rows: to ask costs as much as a small step.
    """

    def __init__(self) -> None:
        self._asks_once = registry.has_current() and _runs_programs()
        self._asks = True
        self._known: dict[int | None, float] = {}
        # Collectives of backward come from another thread.
        self._found: list[Fraction] | None = None
        self._listening = contextlib.ExitStack()

    def begin(self, is_last: bool) -> None:
        """A step begins; the epoch's last may have other rows."""
        if self._asks or is_last:
            self._found = []
            self._listening.enter_context(events.listen(self._add))

    def end(self, rows: int | None) -> float | None:
        """Returns the bytes that the step has sent; None: it is not known."""
        self._listening.close()
        found, self._found = self._found, None
        if found is not None:
            self._known[rows] = float(sum(found, Fraction(0)))
        self._asks = not self._asks_once or rows not in self._known
        return self._known.get(rows)

    def _add(self, event: Event) -> None:
        if self._found is not None:
            self._found.append(event.bytes)

    def close(self) -> None:
        self._listening.close()


class Waits:
    """Measures how long a process has waited in collectives, by its record.

    What a compiled program waits is not seen.
    """

    def __init__(self) -> None:
        self._is_seen = registry.has_current() and not _runs_programs()
        self._first = self._last = waited(bytes(recorder), 0)[1]

    def take(self) -> float | None:
        """Seconds since it was last asked; None: nothing was ever recorded."""
        if not self._is_seen:
            return None
        seconds, self._last = waited(bytes(recorder), self._last)
        return seconds if self._last > self._first else None


# memory ---------------------------------------------------------------------------------------------------------------


def memory() -> dict[str, int]:
    """The most bytes that were in use: of each device of this process, or of the process on CPUs."""
    found = _PEAKS[keras.config.backend()]() if keras.config.backend() in _PEAKS else {}
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found or {"process": size if sys.platform == "darwin" else size << 10}


def _of_torch() -> dict[str, int]:
    cuda = sys.modules["torch"].cuda
    if not cuda.is_initialized():
        return {}
    return {f"cuda:{cuda.current_device()}": int(cuda.max_memory_allocated())}


def _of_jax() -> dict[str, int]:
    told = {str(device): device.memory_stats() for device in sys.modules["jax"].local_devices()}
    return {name: int(stats["peak_bytes_in_use"]) for name, stats in told.items() if stats}


def _of_tensorflow() -> dict[str, int]:
    config = sys.modules["tensorflow"].config
    gpus = [f"GPU:{number}" for number, _ in enumerate(config.list_physical_devices("GPU"))]
    return {name: int(config.experimental.get_memory_info(name)["peak"]) for name in gpus}


_PEAKS = {"torch": _of_torch, "jax": _of_jax, "tensorflow": _of_tensorflow}

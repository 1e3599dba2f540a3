"""Limits how far steps are dispatched ahead: with too many a dispatch waits in C++, without limit.

Only in several processes: a step whose others do not come is polled for, so that it is noticed. This process's record
(unidist.flight) has an entry of each step, from its dispatch until it is known to be ready.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax

from unidist.backends.jax import joining, waiting
from unidist.flight.recorder import recorder
from unidist.keras.patching.patches import calling

# Steps under way beside the one that is dispatched: while one runs, the next one waits for it in the devices.
_AHEAD = 2


class _UnderWay(threading.local):
    """Keeps a part of the results of each step that this thread has dispatched and not seen ready.

    Beside it is its number in the record, oldest first.
    """

    def __init__(self) -> None:
        self.results: deque[tuple[jax.Array, int]] = deque()


_under_way = _UnderWay()


def unhurried(outputs: Any) -> Any:
    """Returns a step's outputs, whole on every device, from a program run beside the dispatching thread."""
    leaves, structure = jax.tree.flatten(outputs)
    return jax.tree.unflatten(structure, [*map(waiting.unhurried, leaves[:1]), *leaves[1:]])


def before_step(what: str) -> None:
    """Returns when few enough steps are under way.

    Raises:
        ProcessLostError: another process has ended, or did not come within the world's timeout.
    """
    _until_under_way(_AHEAD - 1, what)


def _until_under_way(few: int, what: str) -> None:
    world, results = joining.current(), _under_way.results
    while world is not None and len(results) > few:
        array, entry = results.popleft()
        recorder.wait(entry)
        with _ending(entry):
            if not array.is_deleted():
                waiting.until_done(array, world, what)


@contextlib.contextmanager
def _ending(entry: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        recorder.end(entry, failed=True)
        raise
    recorder.end(entry)


def dispatched(what: str, step: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Returns a step's outputs and its state.

    Notes what it will give, but for its state, which the next one takes over.
    """
    world = joining.current()
    if world is None or world.count == 1:
        return step()
    entry = recorder.start(waiting.kind(what, world))
    try:
        outputs, state = step()
    except BaseException:
        recorder.end(entry, failed=True)
        raise
    arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
    if arrays:
        _under_way.results.append((arrays[0], entry))
    else:
        recorder.end(entry)
    return outputs, state


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Lets go, at the end, of what steps give inside."""
    try:
        yield
    finally:
        for _, entry in _under_way.results:
            recorder.end(entry, failed=sys.exception() is not None)
        _under_way.results.clear()


@calling
def syncing(original: Any, self: Any) -> None:
    """Wraps JAXTrainer.jax_state_sync: what variables get, and steps have given, is there to be read."""
    # What raises is not kept waiting for steps whose others may not come.
    if sys.exception() is None:
        _until_under_way(0, "steps")
    original(self)


@calling
def converting(original: Any, x: Any) -> Any:
    """Keras's convert_to_numpy, by which it reads logs and outputs: NumPy itself would wait in C++."""
    world = joining.current()
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if world is not None and is_array and not x.is_deleted():
        waiting.poll(x, world, "reading a value")
    return original(x)

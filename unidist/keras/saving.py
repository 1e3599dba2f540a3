"""Files in several processes: all gather, process 0 writes, each reads, and all learn how it went."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from unidist.keras.agreement import Peers
from unidist.keras.compat import saving_api
from unidist.keras.interception import Hook
from unidist.keras.writing import Crew, LoadingFailedError


def hooks_of_saving(
    crew: Callable[[Any], Crew | None], gathered: Callable[[Any], AbstractContextManager[None]]
) -> tuple[Hook, ...]:
    """Keras's savers, under every name that they have: every process calls them, and process 0 writes the file that one
    device would. They return when it is there, and raise SavingFailedError where it could not be.

    Args:
        crew: the processes that hold a model together; None where this one holds it alone.
        gathered: inside, a model's variables read as whole values in process 0, which asks the others no more. A
            collective of the crew.
    """

    def by_one(original: Any) -> Any:
        @functools.wraps(original)
        def save(model: Any, *args: Any, **kwargs: Any) -> Any:
            several = crew(model)
            if several is None:
                return original(model, *args, **kwargs)
            with contextlib.ExitStack() as stack:
                stack.enter_context(gathered(model))
                stack.enter_context(several.told_to_all())
                return original(model, *args, **kwargs) if several.is_first else None

        return save

    why = "process 0 writes what all hold"
    return tuple(Hook(saving_api, name, by_one, why, imported=True) for name in ("save_model", "save_weights"))


def hooks_of_loading(peers: Callable[[Any], Peers | None]) -> tuple[Hook, ...]:
    """Keras's loaders: where one process of those that train together fails, the others raise too, and none goes on
    with weights of its own.

    Args:
        peers: the processes that hold a model together, or that one which is not made yet would be on (given None).
    """

    def by_all(original: Any) -> Any:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            model = None if original.__name__ == "load_model" else args[0] if args else kwargs.get("model")
            with _told(peers(model)):
                return original(*args, **kwargs)

        return load

    why = "all processes load or none does"
    return tuple(Hook(saving_api, name, by_all, why, imported=True) for name in ("load_model", "load_weights"))


@contextlib.contextmanager
def _told(others: Peers | None) -> Iterator[None]:
    """Raises LoadingFailedError where another process failed inside."""
    if others is None:
        yield
        return
    try:
        yield
    except BaseException:
        others.of_all(1)
        raise
    failed = [rank for rank, number in zip(others.ranks, others.of_all(0), strict=True) if number]
    if failed:
        raise LoadingFailedError(
            f"ranks {failed} could not load (their own output says why), and this one could. Every process reads the "
            "file by itself: put it where all of them can read it"
        )

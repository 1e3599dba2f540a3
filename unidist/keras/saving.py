"""Files in several processes: all gather, process 0 writes, each reads, and all learn how it went."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from math import prod
from typing import Any

import psutil

from unidist import log
from unidist.backends.protocol import itemsize
from unidist.errors import CapabilityError
from unidist.keras.active_distribution import all_variables
from unidist.keras.consistency.processes import Processes
from unidist.keras.patching.compat import saving_api
from unidist.keras.patching.patches import Hook, calling

# What a writer calls within writes too, and is a part of it: the processes meet at its end.
_writing: ContextVar[bool] = ContextVar("unidist_writing", default=False)


def is_writing() -> bool:
    """Returns whether a writer is at work in this process, for all of those that meet at its end."""
    return _writing.get()


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Makes what is called inside parts of one writer."""
    token = _writing.set(True)
    try:
        yield
    finally:
        _writing.reset(token)


def hooks_of_saving(
    processes: Callable[[Any], Processes | None], gathered: Callable[[Any], AbstractContextManager[None]]
) -> tuple[Hook, ...]:
    """Hooks into Keras's savers, under every name that they have.

    Every process calls them, and process 0 writes the file that one device would. They return when it is there, and
    raise SavingFailedError where it could not be.

    Args:
        processes: those that hold a model together; None where this one holds it alone.
        gathered: inside, a model's variables read as whole values in process 0, which asks the others no more. A
            collective of the processes.
    """

    @calling
    def by_one(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return by_first(model, processes(model), gathered, lambda: original(model, *args, **kwargs))

    why = "process 0 writes what all hold"
    return tuple(Hook(saving_api, name, by_one, why, imported=True) for name in ("save_model", "save_weights"))


def by_first(
    model: Any,
    several: Processes | None,
    gathered: Callable[[Any], AbstractContextManager[None]],
    write: Callable[[], Any],
) -> Any:
    """Writes in the first process, which holds whole values meanwhile, and returns in all when it is done.

    Args:
        model: the one that is written; None: no values are.
        several: the processes that do this together.
        gathered: as in `hooks_of_saving`.
        write: reads and writes.

    Raises:
        SavingFailedError: on the other processes, where the first one could not write.
    """
    if several is None or is_writing():
        return write()
    with contextlib.ExitStack() as stack:
        stack.enter_context(log.while_long("saving" if model is None else f"saving model {model.name!r}"))
        if model is not None:
            stack.enter_context(gathered(model))
        stack.enter_context(several.saving())
        stack.enter_context(writing())
        return write() if several.is_first else None


def hooks_of_loading(processes: Callable[[Any], Processes | None]) -> tuple[Hook, ...]:
    """Hooks into Keras's loaders: where one process fails, the others raise too.

    So none of those that train together goes on with weights of its own.

    Args:
        processes: those that hold a model together, or that one which is not made yet would be on (given None).
    """

    @calling
    def by_all(original: Any, *args: Any, **kwargs: Any) -> Any:
        model = None if original.__name__ == "load_model" else args[0] if args else kwargs.get("model")
        several = processes(model)
        with contextlib.nullcontext() if several is None else several.loading():
            return original(*args, **kwargs)

    why = "all processes load or none does"
    return tuple(Hook(saving_api, name, by_all, why, imported=True) for name in ("load_model", "load_weights"))


def agree_on_room(model: Any, several: Processes | None) -> None:
    """Raises on all processes where the first has no memory for a model's whole values. A collective."""
    if several is not None:
        with several.saving():
            if several.is_first:
                check_room(model)


def check_room(model: Any) -> None:
    """Looks whether this process has memory for all of a model's whole values, where the system says.

    Raises:
        CapabilityError: it has less than they take.
    """
    needed = sum(prod(v.shape) * itemsize(str(v.dtype)) for v in all_variables(model) if str(v.dtype) != "string")
    room = psutil.virtual_memory().available
    if needed > room:
        raise CapabilityError(
            f"saving {model.name!r} as one file gathers {needed / 2**30:.1f} GiB in process 0, which has "
            f"{room / 2**30:.1f} GiB of memory left: unidist.save(model, directory) writes it from all processes, each "
            "its own shards"
        )

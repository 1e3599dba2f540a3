"""Saving in several processes: all gather, process 0 writes, and all learn how it went."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from keras.src.saving import saving_api

from unidist.keras import making
from unidist.keras.partitioned import placing, processes
from unidist.keras.partitioned.interception import around
from unidist.keras.writing import Crew

_SAVERS = ("save_model", "save_weights")


def crew() -> Crew | None:
    """The processes of the world, if there are several."""
    return Crew(processes.is_first(), processes.from_first) if processes.several() else None


def install() -> None:
    """Wraps Keras's savers, under every public name that they have."""
    for name in _SAVERS:
        original = getattr(saving_api, name, None)
        around(saving_api, name, one_writer)
        for module in [m for n, m in sys.modules.items() if n == "keras" or n.startswith("keras.")]:
            if vars(module).get(name) is original:
                setattr(module, name, getattr(saving_api, name))


def one_writer(original: Any) -> Any:
    """A saver that every process calls and process 0 runs: the same file as from one device.

    Returns when the file is there, on every process. A collective of the world.

    Raises:
        SavingFailedError: on the other processes, where process 0's saver raised.
    """

    @functools.wraps(original)
    def save(model: Any, *args: Any, **kwargs: Any) -> Any:
        several = crew()
        if several is None:
            return original(model, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_gathered(model))
            stack.enter_context(several.told_to_all())
            return original(model, *args, **kwargs) if several.is_first else None

    return save


@contextlib.contextmanager
def _gathered(model: Any) -> Iterator[None]:
    """On process 0 the model's variables read as whole values, without asking the others again."""
    held = []
    for variable in making.all_variables(model):
        value = variable.value
        if value.is_fully_addressable or value.is_fully_replicated:
            continue
        host = processes.whole(value)
        if processes.is_first():
            setattr(variable, placing.WHOLE, host)
            held.append(variable)
    try:
        yield
    finally:
        for variable in held:
            delattr(variable, placing.WHOLE)

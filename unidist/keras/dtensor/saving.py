"""Saving in several processes: all gather, process 0 writes, and all learn how it went."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from keras.src.saving import saving_api

from unidist.keras import making
from unidist.keras.dtensor import placing, values, worlds
from unidist.keras.partitioned.interception import around

_SAVERS = ("save_model", "save_weights")


def install() -> None:
    """Wraps Keras's savers, under every public name that they have."""
    for name in _SAVERS:
        original = getattr(saving_api, name, None)
        around(saving_api, name, one_writer)
        for module in [m for n, m in sys.modules.items() if n == "keras" or n.startswith("keras.")]:
            if vars(module).get(name) is original:
                setattr(module, name, getattr(saving_api, name))


def one_writer(original: Any) -> Any:
    """A saver that every process calls and process 0 runs. Returns when the file is there. A collective of the world.

    Raises:
        SavingFailedError: on the other processes, where process 0's saver raised.
    """

    @functools.wraps(original)
    def save(model: Any, *args: Any, **kwargs: Any) -> Any:
        several = worlds.crew() if placing.is_placed(model) else None
        if several is None:
            return original(model, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_gathered(model))
            stack.enter_context(several.told_to_all())
            return original(model, *args, **kwargs) if several.is_first else None

    return save


@contextlib.contextmanager
def _gathered(model: Any) -> Iterator[None]:
    """The model's variables read as whole values, without asking the other processes again."""
    spread = [v._value for v in making.all_variables(model) if isinstance(v._value, values.SpreadVariable)]
    for value in spread:
        value.held = values.whole(value)
    try:
        yield
    finally:
        for value in spread:
            value.held = None

"""Saving in several processes: all gather, process 0 writes, and all learn how it went."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from unidist.keras.compat import saving_api
from unidist.keras.interception import around
from unidist.keras.writing import Crew


def install(crew: Callable[[Any], Crew | None], gathered: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Wraps Keras's savers, under every public name that they have: every process calls them, and process 0 writes
    the file that one device would. They return when it is there, and raise SavingFailedError where it could not be.

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

    for name in ("save_model", "save_weights"):
        original = getattr(saving_api, name, None)
        around(saving_api, name, by_one)
        for module in [m for n, m in sys.modules.items() if n == "keras" or n.startswith("keras.")]:
            if vars(module).get(name) is original:
                setattr(module, name, getattr(saving_api, name))

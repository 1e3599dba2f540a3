"""A model's whole values for the process that saves it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from unidist.keras import making
from unidist.keras.partitioned import placing, processes


@contextlib.contextmanager
def gathered(model: Any) -> Iterator[None]:
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

"""The processes that hold a model together, and their values for the one that saves it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from unidist.keras import active_distribution
from unidist.keras.consistency.processes import Processes
from unidist.keras.saving import agree_on_room
from unidist.keras.strategies import distribution as distributions
from unidist.keras.tensorflow import placing, values, worlds


def holding(model: Any) -> Processes | None:
    """Returns the processes of the world, if several hold the model, or would once it is made."""
    found = distributions.current() if model is None else placing.distribution_of(model)
    return None if found is None else worlds.processes()


@contextlib.contextmanager
def gathered(model: Any) -> Iterator[None]:
    """The model's variables read as whole values, without asking the other processes again."""
    agree_on_room(model, worlds.processes())
    spread = [v._value for v in active_distribution.all_variables(model) if isinstance(v._value, values.SpreadVariable)]
    for value in spread:
        value.held = values.whole(value)
    try:
        yield
    finally:
        for value in spread:
            value.held = None

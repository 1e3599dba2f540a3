"""The processes that hold a model together, and their values for the one that saves it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from unidist.keras import making
from unidist.keras import strategy as strategies
from unidist.keras.agreement import Peers
from unidist.keras.dtensor import placing, values, worlds
from unidist.keras.writing import Crew


def crew(model: Any) -> Crew | None:
    """The processes of the world, if there are several and the model lies on them."""
    return worlds.crew() if placing.is_placed(model) else None


def peers(model: Any) -> Peers | None:
    """The processes of the world, if there are several and the model lies on them, or would once it is made."""
    found = strategies.current() if model is None else placing.distribution_of(model)
    return None if found is None else worlds.peers()


@contextlib.contextmanager
def gathered(model: Any) -> Iterator[None]:
    """The model's variables read as whole values, without asking the other processes again."""
    spread = [v._value for v in making.all_variables(model) if isinstance(v._value, values.SpreadVariable)]
    for value in spread:
        value.held = values.whole(value)
    try:
        yield
    finally:
        for value in spread:
            value.held = None

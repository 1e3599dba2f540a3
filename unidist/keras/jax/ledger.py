"""Reads what a compiled step communicates from its program; the ledger gets it at each run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from unidist import events, session
from unidist.backends.jax.hlo import collectives_of, events_of
from unidist.events import Event
from unidist.keras.strategies.strategy import adopt


class ProgramCollectives:
    """The collectives of a compiled step, read once for each shape and place of its arguments.

    They are those of the program as XLA compiled it: merged, split or replaced where XLA did so, the few scalars of
    the loss and the metrics among them. Seen by the first rank of this process.

    Args:
        function: the step as jax.jit gave it.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._found: dict[Any, tuple[Event, ...]] = {}

    def record(self, distribution: Any, purpose: str, state: Any, batch: Any) -> None:
        """Reports to the ledger one run of the step with these arguments. Compiles the step where it is new."""
        leaves, structure = jax.tree.flatten((state, batch))
        key = (structure, tuple((leaf.shape, str(leaf.dtype), leaf.sharding) for leaf in leaves))
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._read(distribution, purpose, state, batch)
        for event in found:
            events.emit(event)

    def _read(self, distribution: Any, purpose: str, state: Any, batch: Any) -> tuple[Event, ...]:
        mesh = adopt(distribution).mesh
        here = next((rank for rank in session.backend().local_ranks() if rank in mesh.devices), mesh.devices[0])
        text = self._function.lower(state, batch).compile().as_text()
        seen = events_of(collectives_of(text, mesh.size), mesh, here)
        return tuple(replace(event, purpose=purpose) for event in seen)

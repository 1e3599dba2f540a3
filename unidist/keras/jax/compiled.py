"""Compares a trainer's step among processes before it first runs, and reads its program for a ledger."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import jax

from unidist import events, log, session
from unidist.backends.checking import checks_all
from unidist.backends.jax import agreeing, joining
from unidist.backends.jax.hlo import collectives_of, events_of
from unidist.events import Event
from unidist.keras.jax import data
from unidist.keras.strategies.distribution import adopt

# What Python puts into a text for an object without a better one, and differs between processes.
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_OPERATION = re.compile(r"\b(?:stablehlo|sdy|chlo)\.(\w+)")


class Program:
    """A step, and what is known of it for each kind of arguments that it has run with.

    Args:
        function: the step, as jax.jit gave it or as a Python function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function: Any = function
        self.is_compiled = hasattr(function, "lower")
        self._is_made = not self.is_compiled
        self._compared: set[Hashable] = set()
        self._sent: dict[Hashable, tuple[Event, ...]] = {}

    @contextlib.contextmanager
    def made(self, what: str) -> Iterator[None]:
        """Says that it is compiled inside, where that takes long and is the first time."""
        if self._is_made:
            yield
            return
        with log.while_long(f"compiling a {what}"):
            yield
        self._is_made = True

    def compare(self, what: str, distribution: Any, state: Any, batch: Any) -> None:
        """Returns when all processes of the mesh have come to the same step, on a batch of the same shapes.

        Does nothing where the step has run on such a batch before, unless UNIDIST_CHECK is "all". Traces and lowers the
        step, which its first run then finds done.

        Raises:
            DesyncError: they have not.
            ProcessLostError: one of them did not come.
        """
        world = joining.current()
        if world is None:
            return
        leaves, structure = jax.tree.flatten(batch)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves), len(state)
        is_new = key not in self._compared
        if not is_new and not checks_all():
            return
        how = {"batch": ", ".join(map(data.described, jax.tree.leaves(batch, is_leaf=data.is_padded_leaf)))}
        if is_new:
            how |= _told(state)
            if self.is_compiled:
                how |= told_program(self._function.lower(state, batch).as_text())
        devices = distribution.device_mesh.backend_mesh.devices.flat
        agreeing.meet(world, what, how, sorted({device.process_index for device in devices}), jax.devices())
        self._compared.add(key)

    def record(self, what: str, distribution: Any, state: Any, batch: Any) -> None:
        """Reports to the ledger the collectives of one run, as this process's first rank sees them.

        They are those of the program as XLA compiled it: merged, split or replaced where XLA did so, the few scalars
        of the loss and the metrics among them. Compiles the step where it is new.
        """
        if not self.is_compiled or not events.listening():
            return
        leaves, structure = jax.tree.flatten((state, batch))
        key = structure, tuple((leaf.shape, str(leaf.dtype), leaf.sharding) for leaf in leaves)
        if key not in self._sent:
            mesh = adopt(distribution).mesh
            here = next((rank for rank in session.backend().local_ranks() if rank in mesh.devices), mesh.devices[0])
            text = self._function.lower(state, batch).compile().as_text()
            seen = events_of(collectives_of(text, mesh.size), mesh, here)
            self._sent[key] = tuple(replace(event, purpose=f"{what} (compiled)") for event in seen)
        for event in self._sent[key]:
            events.emit(event)


def _told(state: Any) -> dict[str, str]:
    leaves = jax.tree.leaves(state)
    return {"variables": str(len(leaves)), "values": str(sum(leaf.size for leaf in leaves))}


def told_program(text: str) -> dict[str, str]:
    """Counts each operation of a program, given as StableHLO, and takes a digest without addresses.

    Example:
        >>> told_program("%1 = stablehlo.add %0, %0")
        {'add': '1', 'program': '090faccefdaa'}
    """
    counts = {name: str(count) for name, count in sorted(Counter(_OPERATION.findall(text)).items())}
    return {**counts, "program": hashlib.sha256(_ADDRESS.sub("0x", text).encode()).hexdigest()[:12]}

"""Compares a step among processes before it runs on something new: program, and the batch's shapes."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from unidist.backends.checking import checks_all
from unidist.backends.jax import agreeing, joining
from unidist.keras.jax import data

# What Python puts into a text for an object without a better one, and differs between processes.
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_OPERATION = re.compile(r"\b(?:stablehlo|sdy|chlo)\.(\w+)")


class Agreement:
    """Checks that the processes run the same step.

    Args:
        function: the step, as jax.jit gave it or as a Python function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function: Any = function
        self._known: set[Any] = set()

    def check(self, what: str, mesh: jax.sharding.Mesh, state: Any, batch: Any) -> None:
        """Returns when all processes of the mesh have come to the same.

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
        is_new = key not in self._known
        if not is_new and not checks_all():
            return
        how = {"batch": ", ".join(map(data.described, jax.tree.leaves(batch, is_leaf=data.is_padded_leaf)))}
        if is_new:
            how |= _told(state)
            if hasattr(self._function, "lower"):
                how |= told_program(self._function.lower(state, batch).as_text())
        processes = sorted({device.process_index for device in mesh.devices.flat})
        agreeing.agree(world, what, how, processes, jax.devices())
        self._known.add(key)


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

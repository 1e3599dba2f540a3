"""What the processes of the parity suite keep in memory, and take from there. Nodes are made up: each has its files."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tests.parity import checkpoints
from tests.parity.train import Spec
from tests.support.clearing import cleared
from unidist.backends.environment import MEMORY

Told = list[str]


def _copies(said: Told, folder: str) -> Any:
    """Of this process, to which its node's launcher has said which files there are."""
    import unidist
    from unidist.keras.checkpoint.copies import Copies

    os.environ[MEMORY] = said[unidist.process_index()]
    try:
        return Copies(folder)
    finally:
        del os.environ[MEMORY]


def _model(spec: Spec) -> Any:
    import unidist

    model = checkpoints.build(spec)
    unidist.describe(model)  # on DTensor a model is placed when it is first used
    return model


def keep(said: Told, folder: str, spec: Spec, steps: list[int]) -> tuple[int, dict[str, float]]:
    """Keeps steps, the last of them with the values that are known. (bytes written a step, op -> bytes sent of it)."""
    import unidist
    from unidist.keras.checkpoint.states import State

    model = _model(spec)
    copies = _copies(said, folder)
    for step in steps:
        if step == steps[-1]:
            checkpoints.fill(model)
        with unidist.ledger() as sent:
            copies.save(model, step, {"note": step})
    copies.close()
    moved = [event for event in sent.events if event.purpose == "a step in memory"]
    ops = {event.op for event in moved}
    told = {op: float(sum(event.bytes for event in moved if event.op == op)) for op in ops}
    return sum(rows.nbytes for _, _, rows in State.of(model).pieces()), told


def take(said: Told, folder: str, spec: Spec, newer_than: int = 0) -> tuple[int, Any, dict[str, Any]] | None:
    """(step, the facts that were kept with it, path -> bits of the value), or None where nothing whole is there."""

    from unidist.keras.checkpoint import api as saving
    from unidist.keras.checkpoint.states import State

    cleared()
    model = _model(spec)
    source = _copies(said, folder).find(State.of(model).holders, newer_than)
    if source is None:
        return None
    saving.restore_from(model, source)
    values = {v.path: checkpoints._bits(np.asarray(v)) for v in checkpoints.variables(model)}
    return source.step, source.facts["facts"], values

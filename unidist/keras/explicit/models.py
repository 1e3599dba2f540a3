"""What can be asked of a model on torch: place it, describe it, gather it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from unidist.backends.protocol import Array
from unidist.keras import sessions
from unidist.keras.explicit import engine, mixing
from unidist.keras.rows import Row
from unidist.keras.strategy import UnidistDistribution


def parallelize(model: Any, distribution: UnidistDistribution) -> None:
    """Places a built model, its optimizer and its metrics, in place."""
    found = engine.engine_for(model, distribution)
    with found.session():
        found.prepare()


def rows(model: Any) -> list[Row]:
    """One row for each variable of the model and of its built optimizer, measured from the tensors held.

    No collective: one process may ask alone.

    Raises:
        LayoutError: a strict rule of the model's distribution matches none of its variables.
    """
    found = engine.engine_of(model)
    if found is not None and model.built:
        sessions.check_rules(model, found.distribution)
    optimizer = getattr(model, "optimizer", None)
    slots = list(optimizer.variables) if optimizer is not None and optimizer.built else []
    return [*(_row(v, "weights") for v in model.variables), *(_row(v, "slots") for v in slots)]


def why(model: Any) -> dict[str, str]:
    """name -> why it is given the rows of all shards or not, of what may look at several rows."""
    found = engine.engine_of(model)
    mixers = list(found.mixers) if found is not None else []
    mixers += mixing.of_losses(model)
    return {mixer.name: mixer.why for mixer in mixers}


def _row(variable: Any, kind: str) -> Row:
    held = getattr(variable, "_place", None)
    if held is None:
        value = variable.value
        shape = tuple(value.shape)
        return Row(variable.path, shape, str(variable.dtype), None, shape, value.nbytes, kind, _gradient_bytes([value]))
    shards = list(held.shards.values())
    first = shards[0]
    return Row(
        path=variable.path,
        shape=held.lies.stored.shape,
        dtype=str(variable.dtype),
        layout=held.lies.stored.layout,
        local_shape=tuple(first.shape),
        bytes_per_device=max(shard.numel() * shard.element_size() for shard in shards),
        kind=kind,
        gradient_bytes=_gradient_bytes(held.states.values()),
    )


def _gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return max(p.grad.nbytes if p.is_leaf and p.grad is not None else 0 for p in parameters)


def gather_weights(model: Any) -> list[tuple[str, Array]]:
    """(path, full value) of every weight, on every process."""
    return [(v.path, np.asarray(v)) for v in model.weights]

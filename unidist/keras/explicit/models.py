"""What can be asked of a model on torch: place it, describe it, gather it."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidist.backends.protocol import Array
from unidist.keras.explicit import engine
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
        found.distribution.check_model([v.path for v in model.variables])
    optimizer = getattr(model, "optimizer", None)
    slots = list(optimizer.variables) if optimizer is not None and optimizer.built else []
    return [_row(v) for v in [*model.variables, *slots]]


def _row(variable: Any) -> Row:
    held = getattr(variable, "_place", None)
    if held is None:
        value = variable.value
        return Row(variable.path, tuple(value.shape), str(variable.dtype), None, tuple(value.shape), value.nbytes)
    shards = list(held.shards.values())
    first = shards[0]
    return Row(
        path=variable.path,
        shape=held.sharding.shape,
        dtype=str(variable.dtype),
        layout=held.layout,
        local_shape=tuple(first.shape),
        bytes_per_device=max(shard.numel() * shard.element_size() for shard in shards),
    )


def gather_weights(model: Any) -> list[tuple[str, Array]]:
    """(path, full value) of every weight, on every process."""
    return [(v.path, np.asarray(v)) for v in model.weights]

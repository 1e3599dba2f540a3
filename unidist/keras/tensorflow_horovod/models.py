"""Answers what can be asked of a model on TensorFlow over Horovod: place, describe or gather it."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidist.algebra import Layout
from unidist.backends.protocol import Array
from unidist.keras.api.variable_rows import Row
from unidist.keras.records import model_record
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.tensorflow_horovod import engine


def parallelize(model: Any, distribution: UnidistDistribution) -> None:
    """Makes a built model data parallel, in place: from here on every process has rank 0's weights."""
    model_record.engine_for(model, distribution, engine.Engine).prepare()


def rows(model: Any) -> list[Row]:
    """One row for each variable of the model and of its built optimizer. No collective."""
    found = engine.engine_of(model)
    optimizer = getattr(model, "optimizer", None)
    slots = list(optimizer.variables) if optimizer is not None and optimizer.built else []
    return [_row(v, None if found is None else Layout()) for v in [*model.variables, *slots]]


def _row(variable: Any, layout: Layout | None) -> Row:
    shape, dtype = tuple(variable.shape), str(variable.dtype)
    size = int(np.prod(shape)) * np.asarray(variable).itemsize
    return Row(variable.path, shape, dtype, layout, shape, size)


def reasons(model: Any) -> list[tuple[str, str]]:
    """Returns (name, why it is given all ranks' rows or not) of what may look at several.

    No weights are cut.
    """
    found = engine.engine_of(model)
    return [] if found is None else [(mixer.name, mixer.why) for mixer in found.mixers or ()]


def gather_weights(model: Any) -> list[tuple[str, Array]]:
    """(path, full value) of every weight: every process holds them."""
    return [(v.path, np.asarray(v)) for v in model.weights]

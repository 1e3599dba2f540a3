"""The functions of this package that unidist.keras.driver.Driver names."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidist.algebra import Layout
from unidist.backends.protocol import Array
from unidist.errors import CapabilityError
from unidist.keras.checkpoint.held import Held, Whole
from unidist.keras.consistency.processes import Processes
from unidist.keras.driver import Row
from unidist.keras.records import model_record
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.tensorflow_horovod import engine
from unidist.keras.tensorflow_horovod.hooks import table as table
from unidist.keras.tensorflow_horovod.hooks import writing as writing
from unidist.planner.layout_map import LayoutMap
from unidist.strategies import Strategy
from unidist.strategies.zero import STAGES

RUNS_PROGRAMS = False
world = engine.processes


def prepare() -> None:
    """There is nothing to do before the hooks."""


def check(strategy: Strategy, layout_map: LayoutMap | None) -> None:
    """Raises CapabilityError where it cuts variables or their state, or draws exactly."""
    if layout_map is not None or strategy.data_shards != strategy.mesh.size:
        raise CapabilityError(
            "use('horovod') with Keras on TensorFlow is data parallel only, over all axes of the mesh: for "
            "ModelParallel set KERAS_BACKEND=torch before Keras is imported, or use DataParallel"
        )
    if strategy.zero in STAGES[1:]:
        raise CapabilityError(
            f"zero={strategy.zero}: use('horovod') with Keras on TensorFlow keeps everything on every process; use "
            "zero=0, or set KERAS_BACKEND=torch before Keras is imported"
        )
    if strategy.exact_random:
        raise CapabilityError(
            "exact_random=True: use('horovod') with Keras on TensorFlow draws for each process's own rows. Leave it "
            "out, or set KERAS_BACKEND=torch before Keras is imported"
        )


def leave() -> None:
    """Each process holds whole models, which are its own from here on."""


def rehearse(*step: object) -> str:
    """Says why traffic is an estimate."""
    return "with Keras on TensorFlow no step is rehearsed"


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


def ready(model: Any) -> None:
    """Gives every process rank 0's weights, if the model is distributed."""
    found = engine.engine_of(model)
    if found is not None:
        with found.session():
            found.prepare()


def processes(model: Any) -> Processes | None:
    """Returns the processes that hold the model together, if there are several."""
    return engine.processes() if model_record.of(model).engine is not None else None


def held(variable: Any) -> Held:
    return Whole(variable)

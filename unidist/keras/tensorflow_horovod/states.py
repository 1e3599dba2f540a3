"""Variables on TensorFlow over Horovod as checkpoints see them: each process holds all."""

from __future__ import annotations

from typing import Any

from unidist.keras.checkpoint.held import Held, Whole
from unidist.keras.consistency.processes import Processes
from unidist.keras.records import model_record
from unidist.keras.tensorflow_horovod import engine


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

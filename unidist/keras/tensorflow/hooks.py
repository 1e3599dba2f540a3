"""The attributes of Keras on TensorFlow, and of TensorFlow, that unidist replaces for DTensor.

Made for Keras 3.15 and 3.16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from tensorflow.python.ops import array_ops, gen_math_ops

from unidist.keras import active_distribution, distribution_lib, joined_rows, tensorflow_writes, trainer_entry
from unidist.keras import saving as keras_saving
from unidist.keras.consistency.processes import Processes
from unidist.keras.needs import own_code
from unidist.keras.patching.compat import BaseOptimizer, TensorFlowTrainer, data_adapters
from unidist.keras.patching.compat import tensorflow_core as keras_core
from unidist.keras.patching.compat import tensorflow_distribution_lib as keras_distribution_lib
from unidist.keras.patching.compat import tensorflow_numpy as keras_numpy
from unidist.keras.patching.patches import Hook, Table, by
from unidist.keras.saving import agree_on_room
from unidist.keras.strategies import distribution as distributions
from unidist.keras.tensorflow import parts, pinning, placing, slicing, trainer, values, worlds

_CAPTURES = "tensorflow.core.function.capture.capture_container:FunctionCaptures"


def table() -> Table:
    """They do nothing where no distribution is active or remembered."""
    return Table(
        (
            *_of_distribution(),
            *_of_trainers(),
            *pinning.hooks(),
            Hook(array_ops, "strided_slice", slicing.slicing, "slices of what is cut are gathered"),
            Hook(gen_math_ops, "select_v2", slicing.selecting, "one condition is spread over what it chooses from"),
            Hook(keras.losses.Loss, "__call__", slicing.losing, "losses of the user's own are given whole batches"),
            Hook(_CAPTURES, "capture_by_value", slicing.capturing, "tensors on no mesh are constants", needed=own_code),
            Hook(array_ops, "scatter_nd", slicing.scattering, "what is scattered is gathered"),
            joined_rows.hook(),
            *keras_saving.hooks_of_saving(holding, gathered),
            *keras_saving.hooks_of_loading(holding),
        )
    )


def _of_distribution() -> Iterator[Hook]:
    """Yields the hooks by which the backend in use answers what keras.distribution asks of Keras's."""
    why = "keras.distribution's answers are the backend's in use"
    for name in ("list_devices", "get_device_count", "initialize", "num_processes", "process_id"):
        yield Hook(keras_distribution_lib, name, by(getattr(distribution_lib, name)), why, adds=True)
    layout = "DTensor lays out results of layers: their values do not depend on it"
    yield Hook(keras_distribution_lib, "distribute_tensor", by(lambda tensor, layout: tensor), layout, adds=True)


def _of_trainers() -> Iterator[Hook]:
    yield from trainer_entry.hooks(TensorFlowTrainer, placing.distribution_of, trainer.entering)
    yield trainer_entry.hook_of_errors()
    building = "models are built under their distribution"
    yield Hook(TensorFlowTrainer, "_maybe_symbolic_build", trainer.building, building)
    for kind in ("train", "test", "predict"):
        making_step = trainer.making_step(f"{kind}_function", f"{kind}_step")
        yield Hook(TensorFlowTrainer, f"make_{kind}_function", making_step, "steps run on the mesh")
    yield Hook(TensorFlowTrainer, "get_metrics_result", trainer.telling_metrics, "metrics are read whole")
    yield Hook(keras.Model, "__call__", trainer.calling_model, "models are called on the mesh")
    yield Hook(keras_core.Variable, "_initialize", placing.initializing, "large variables rest in parts")
    yield Hook(keras_core.Variable, "assign", placing.loading, "a device's part is read from a file by itself")
    yield Hook(keras_core.Variable, "value", placing.using, "what no model has is on the mesh of the step that uses it")
    yield from tensorflow_writes.hooks(placing.writing, "each device would write a variable of TensorFlow's")
    for operator in values.OPERATORS:
        yield Hook(keras_core.Variable, operator, values.operating, "outside of steps variables are read on the host")
    yield Hook(keras_core, "scatter", values.scattering, "DTensor has no scatter of its own")
    for name in ("multiply", "divide"):
        yield Hook(keras_numpy, name, values.beside_rows, "what meets rows by their ids is gathered")
    yield Hook(BaseOptimizer, "apply", trainer.applying, "gradients by stage of ZeRO")
    yield Hook(data_adapters, "get_data_adapter", parts.adapting, "a process may have its own rows")


def holding(model: Any) -> Processes | None:
    """Returns the processes of the world, if several hold the model, or would once it is made."""
    found = distributions.current() if model is None else placing.distribution_of(model)
    return None if found is None else worlds.processes()


@contextlib.contextmanager
def gathered(model: Any) -> Iterator[None]:
    """The model's variables read as whole values, without asking the other processes again."""
    agree_on_room(model, worlds.processes())
    spread = [v._value for v in active_distribution.all_variables(model) if isinstance(v._value, values.SpreadVariable)]
    for value in spread:
        value.held = values.whole(value)
    try:
        yield
    finally:
        for value in spread:
            value.held = None

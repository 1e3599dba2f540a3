"""Installs the DTensor engine into Keras on TensorFlow. Made for Keras 3.15 and 3.16."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
from tensorflow.python.ops import array_ops

from unidist.backends import registry
from unidist.keras import distribution_lib, making
from unidist.keras import saving as keras_saving
from unidist.keras.compat import BaseOptimizer, TensorFlowTrainer, data_adapters
from unidist.keras.compat import tensorflow_core as keras_core
from unidist.keras.compat import tensorflow_distribution_lib as keras_distribution_lib
from unidist.keras.compat import tensorflow_optimizer as keras_optimizer
from unidist.keras.dtensor import parts, pinning, placing, recurrent, saving, slicing, trainer, values, worlds
from unidist.keras.interception import around

_state = SimpleNamespace(installed=False)


def install() -> None:
    """Adds the hooks, once. They do nothing where no distribution is active or remembered.

    With the simulator, TensorFlow's virtual CPU devices are its ranks; they are counted here, each time it is chosen.

    Raises:
        BackendMismatchError: a Keras that unidist was not made for, or TensorFlow runs with other devices already.
    """
    if registry.has_current() and registry.current().name == "sim":
        worlds.backend()
    if _state.installed:
        return
    _install_distribution()
    steps: Any = TensorFlowTrainer
    around(steps, "__init__", making.making_model)
    for name in trainer.ENTRANCES:
        around(steps, name, trainer.entering)
    around(steps, "_maybe_symbolic_build", trainer.building)
    for kind in ("train", "test", "predict"):
        around(steps, f"make_{kind}_function", trainer.making_step(f"{kind}_function", f"{kind}_step"))
    around(steps, "get_metrics_result", trainer.telling_metrics)
    around(keras.Model, "__call__", trainer.calling)
    around(keras_core, "scatter", values.scattering)
    around(keras_optimizer.TFOptimizer, "add_variable_from_reference", placing.adding_slot)
    around(BaseOptimizer, "apply", trainer.applying)
    around(data_adapters, "get_data_adapter", parts.adapting)
    pinning.install()
    recurrent.install()
    around(array_ops, "strided_slice", slicing.slicing)
    keras_saving.install(saving.crew, saving.gathered)
    keras_saving.install_loading(saving.peers)
    _state.installed = True


def align_seeds() -> None:
    """All processes go on with process 0's random state. A collective of the world."""
    worlds.align_seeds()


def _install_distribution() -> None:
    """What keras.distribution asks of a Keras backend, answered by the backend in use."""
    here: Any = keras_distribution_lib
    for name in ("list_devices", "get_device_count", "initialize", "num_processes", "process_id"):
        setattr(here, name, getattr(distribution_lib, name))

    def distribute_tensor(tensor: Any, layout: Any) -> Any:
        """DTensor chooses how results of layers lie: their values do not depend on it."""
        return tensor

    here.distribute_tensor = distribute_tensor

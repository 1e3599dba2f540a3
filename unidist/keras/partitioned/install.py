"""Installs the engine into Keras on JAX. Made for Keras 3.15 and 3.16; tests/keras/jax checks every place."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from unidist.backends import registry
from unidist.keras import making
from unidist.keras import saving as keras_saving
from unidist.keras.compat import (
    BaseOptimizer,
    JAXTrainer,
    JaxVariable,
    Layer,
    Metric,
    Operation,
    conversions,
    data_adapters,
)
from unidist.keras.compat import jax_distribution_lib as keras_distribution_lib
from unidist.keras.compat import jax_trainer as keras_trainer
from unidist.keras.interception import around
from unidist.keras.partitioned import (
    data,
    layouts,
    pacing,
    placing,
    processes,
    redistribution,
    regions,
    saving,
    seeds,
    trainer,
)
from unidist.keras.partitioned.devices import prepare_devices

__all__ = ["align_seeds", "install", "prepare_devices"]

_state = SimpleNamespace(installed=False)


def install() -> None:
    """Adds the hooks, once. They do nothing where no distribution is active or remembered.

    With the simulator, JAX's virtual CPU devices are its ranks; they are counted here, each time it is chosen.

    Raises:
        BackendMismatchError: a Keras that unidist was not made for, or JAX runs with fewer devices already.
    """
    if registry.has_current() and registry.current().name == "sim":
        prepare_devices(len(registry.current().list_devices()))
    if _state.installed:
        return
    _install_variables()
    _install_trainer()
    keras_saving.install(lambda model: processes.crew(), saving.gathered)
    keras_saving.install_loading(saving.peers)
    _state.installed = True


def align_seeds() -> None:
    """All processes go on with process 0's random state. A collective of the world."""
    seeds.align()


def _install_variables() -> None:
    around(JaxVariable, "_initialize_layout", placing.initializing_layout)
    around(JaxVariable, "_direct_assign", placing.assigning)
    around(JaxVariable, "__array__", placing.reading)
    around(keras_distribution_lib, "distribute_tensor", layouts.constraining)
    around(keras_distribution_lib, "initialize", processes.joining)
    around(BaseOptimizer, "add_variable_from_reference", placing.adding_slot)
    around(BaseOptimizer, "_overwrite_model_variables_with_average_value", placing.overwriting)
    around(BaseOptimizer, "stateless_apply", redistribution.updating)
    around(Layer, "stateless_call", redistribution.calling)
    around(Operation, "__call__", regions.calling_layer)
    around(Metric, "add_variable", placing.adding_to_metric)
    around(Metric, "stateless_update_state", trainer.measuring)


def _install_trainer() -> None:
    steps: Any = JAXTrainer
    around(steps, "__init__", making.making_model)
    for name in trainer.ENTRANCES:
        around(steps, name, trainer.entering)
    around(steps, "_symbolic_build", trainer.building)
    if hasattr(steps, "_maybe_symbolic_build"):
        # Keras 3.16: it leaves the other out where all is built.
        around(steps, "_maybe_symbolic_build", trainer.building)
    around(steps, "_make_function", trainer.making_function)
    around(steps, "compute_metrics", trainer.measuring)
    around(steps, "jax_state_sync", pacing.syncing)
    around(conversions, "convert_to_numpy", pacing.converting)
    around(keras_trainer, "jit", trainer.compiling)
    around(keras_trainer, "_distribute_data", trainer.distributing_data)
    around(keras_trainer.JAXEpochIterator, "_get_iterator", trainer.iterating)
    hidden = functools.partial(making.active, None)
    around(
        data_adapters,
        "get_data_adapter",
        functools.partial(data.one_for_all, current=placing.current, hidden=hidden),
    )

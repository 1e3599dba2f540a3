"""The attributes of Keras on JAX that unidist replaces.

Made for Keras 3.15 and 3.16; tests/keras/jax checks each.
"""

from __future__ import annotations

from collections.abc import Iterator

from unidist.keras import saving as keras_saving
from unidist.keras import trainer_entry
from unidist.keras.jax import (
    data,
    layouts,
    pacing,
    partitioning,
    placing,
    processes,
    recomputing,
    redistribution,
    regions,
    saving,
    trainer,
)
from unidist.keras.patching.compat import (
    BaseOptimizer,
    JAXTrainer,
    JaxVariable,
    Layer,
    Operation,
    conversions,
    data_adapters,
    jax_core,
)
from unidist.keras.patching.compat import jax_distribution_lib as keras_distribution_lib
from unidist.keras.patching.compat import jax_trainer as keras_trainer
from unidist.keras.patching.patches import Hook, Table, by, calling


def table() -> Table:
    """They do nothing where no distribution is active or remembered."""
    return Table(
        (
            *_of_variables(),
            *_of_trainers(),
            *keras_saving.hooks_of_saving(lambda model: processes.processes(), saving.gathered),
            *keras_saving.hooks_of_loading(saving.loading),
        )
    )


def _of_variables() -> Iterator[Hook]:
    where = "values go to the devices of their layout"
    yield Hook(JaxVariable, "_initialize_layout", by(placing.initialize_layout), where)
    yield Hook(JaxVariable, "_direct_assign", placing.assigning, where)
    yield Hook(JaxVariable, "_initialize_with_initializer", placing.initializing, "one variable's value at a time")
    yield Hook(JaxVariable, "assign", placing.loading, "a device's shard is read from a file by itself")
    yield Hook(JaxVariable, "__array__", placing.reading, "shards of other processes are read too")
    yield Hook(keras_distribution_lib, "distribute_tensor", layouts.constraining, where)
    yield Hook(keras_distribution_lib, "initialize", processes.joining, "joining is unidist's")
    averaging = "_overwrite_model_variables_with_average_value"
    yield Hook(BaseOptimizer, averaging, placing.overwriting, "averages are laid out as their slots")
    yield Hook(BaseOptimizer, "stateless_apply", redistribution.updating, "gradients and updates by stage of ZeRO")
    yield Hook(Layer, "stateless_call", redistribution.calling_stateless, "values are gathered for the call")
    yield Hook(Operation, "__call__", regions.calling_layer, "layers under ZeRO: reduce-scatter of their gradients")
    why = "a layer that writes is recomputed too"
    # From Keras 3.16 on it is read where it was imported to.
    yield Hook(jax_core, "remat", calling(recomputing.remat), why, imported=True)


def _of_trainers() -> Iterator[Hook]:
    yield from trainer_entry.hooks(JAXTrainer, placing.distribution_of, trainer.entering)
    building = "models are built under their distribution"
    yield Hook(JAXTrainer, "_symbolic_build", trainer.building, building)
    # Keras 3.16 leaves the other out where all is built.
    yield Hook(JAXTrainer, "_maybe_symbolic_build", trainer.building_if_needed, building, versions=("3.16",))
    yield Hook(JAXTrainer, "_make_function", trainer.making_function, "steps are compiled with layouts")
    yield Hook(JAXTrainer, "jax_state_sync", pacing.syncing, "waits end when a process is lost")
    yield from partitioning.hooks()
    yield Hook(conversions, "convert_to_numpy", pacing.converting, "waits end when a process is lost")
    yield Hook(keras_trainer, "jit", trainer.compiling, "steps are compiled with layouts")
    yield Hook(keras_trainer, "_distribute_data", trainer.distributing_data, "a batch is cut by its rows")
    yield Hook(keras_trainer.JAXEpochIterator, "_get_iterator", trainer.iterating, "a batch is cut by its rows")
    yield Hook(data_adapters, "get_data_adapter", data.adapting, "process 0's data is everybody's")

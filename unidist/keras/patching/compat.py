"""Every name of `keras.src` that unidist uses, and where each version of Keras has it.

`from unidist.keras.patching.compat import X` imports what X is in the installed Keras, and nothing else: no other
file of unidist names a place inside Keras. A framework's names import the framework.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras

from unidist.errors import BackendMismatchError

# The versions that the places below were read in.
READ = ("3.15", "3.16")
# How the modules of Keras's own classes begin.
INSIDE = "keras.src."
# What Keras writes into files for its own optimizers on torch.
TORCH_OPTIMIZERS = "keras.src.backend.torch.optimizers."

# The same place in all of READ, as "module:name"; "module:" is the module itself.
_PLACES = {
    "backend": "keras.src.backend:",
    "ops": "keras.src.ops:",
    "tree": "keras.src.tree:",
    "global_state": "keras.src.backend.common.global_state:",
    "get_keras_mask": "keras.src.backend.common.masking:get_keras_mask",
    "set_keras_mask": "keras.src.backend.common.masking:set_keras_mask",
    "StatelessScope": "keras.src.backend.common.stateless_scope:StatelessScope",
    "get_stateless_scope": "keras.src.backend.common.stateless_scope:get_stateless_scope",
    "in_stateless_scope": "keras.src.backend.common.stateless_scope:in_stateless_scope",
    "in_symbolic_scope": "keras.src.backend.common.symbolic_scope:in_symbolic_scope",
    "is_float_dtype": "keras.src.backend.common:is_float_dtype",
    "floatx": "keras.src.backend.config:floatx",
    "Callback": "keras.src.callbacks.callback:Callback",
    "CallbackList": "keras.src.callbacks.callback_list:CallbackList",
    "distribution_lib": "keras.src.distribution.distribution_lib:",
    "Distribution": "keras.src.distribution.distribution_lib:Distribution",
    "BaseConv": "keras.src.layers.convolutional.base_conv:BaseConv",
    "Layer": "keras.src.layers.layer:Layer",
    "BatchNormalization": "keras.src.layers.normalization.batch_normalization:BatchNormalization",
    "DropoutRNNCell": "keras.src.layers.rnn.dropout_rnn_cell:DropoutRNNCell",
    "RNN": "keras.src.layers.rnn.rnn:RNN",
    "legacy_h5_format": "keras.src.legacy.saving.legacy_h5_format:",
    "RematMode": "keras.src.backend.common.remat:RematMode",
    "Operation": "keras.src.ops.operation:Operation",
    "Functional": "keras.src.models.functional:Functional",
    "BaseOptimizer": "keras.src.optimizers.base_optimizer:BaseOptimizer",
    "Ftrl": "keras.src.optimizers.ftrl:Ftrl",
    "AutocastScope": "keras.src.backend.common.variables:AutocastScope",
    "get_autocast_scope": "keras.src.backend.common.variables:get_autocast_scope",
    "LossScaleOptimizer": "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer",
    "GLOBAL_SEED_GENERATOR": "keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR",
    "SeedGenerator": "keras.src.random.seed_generator:SeedGenerator",
    "draw_seed": "keras.src.random.seed_generator:draw_seed",
    "global_seed_generator": "keras.src.random.seed_generator:global_seed_generator",
    "saving_api": "keras.src.saving.saving_api:",
    "saving_lib": "keras.src.saving.saving_lib:",
    "serialization_lib": "keras.src.saving.serialization_lib:",
    "data_adapters": "keras.src.trainers.data_adapters:",
    "ArrayDataAdapter": "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter",
    "TorchDataLoaderAdapter": ("keras.src.trainers.data_adapters.torch_data_loader_adapter:TorchDataLoaderAdapter"),
    "array_slicing": "keras.src.trainers.data_adapters.array_slicing:",
    "EpochIterator": "keras.src.trainers.epoch_iterator:EpochIterator",
    "file_utils": "keras.src.utils.file_utils:",
    "jax_utils": "keras.src.utils.jax_utils:",
    "to_snake_case": "keras.src.utils.naming:to_snake_case",
    "GLOBAL_RANDOM_SEED": "keras.src.utils.rng_utils:GLOBAL_RANDOM_SEED",
    # torch
    "torch_random": "keras.src.backend.torch.random:",
    "CustomGradientFunction": "keras.src.backend.torch.core:CustomGradientFunction",
    "TorchLayer": "keras.src.backend.torch.layer:TorchLayer",
    "TorchAdam": "keras.src.backend.torch.optimizers.torch_adam:Adam",
    "TorchSGD": "keras.src.backend.torch.optimizers.torch_sgd:SGD",
    "TorchParallelOptimizer": "keras.src.backend.torch.optimizers.torch_parallel_optimizer:TorchParallelOptimizer",
    "torch_trainer": "keras.src.backend.torch.trainer:",
    "TorchEpochIterator": "keras.src.backend.torch.trainer:TorchEpochIterator",
    "TorchModuleWrapper": "keras.src.utils.torch_utils:TorchModuleWrapper",
    # JAX
    "jax_distribution_lib": "keras.src.backend.jax.distribution_lib:",
    "jax_trainer": "keras.src.backend.jax.trainer:",
    # TensorFlow
    "tensorflow_distribution_lib": "keras.src.backend.tensorflow.distribution_lib:",
}
# What has moved: a place for each of READ.
_MOVED = {
    "Trainer": ("keras.src.trainers.trainer:Trainer", "keras.src.trainers.trainer:BaseTrainer"),
    "conversions": ("keras.src.backend:", "keras.src.backend:ops"),
    "is_tensor": ("keras.src.backend:is_tensor", "keras.src.backend:ops.is_tensor"),
    "random_seed_dtype": ("keras.src.backend:random_seed_dtype", "keras.src.backend:ops.random_seed_dtype"),
    "TorchTrainer": ("keras.src.backend.torch.trainer:TorchTrainer", "keras.src.backend.torch.trainer:Trainer"),
    "torch_convert_to_numpy": (
        "keras.src.backend.torch.core:convert_to_numpy",
        "keras.src.backend.torch.ops.core:convert_to_numpy",
    ),
    "torch_image": ("keras.src.backend.torch.image:", "keras.src.backend.torch.ops.image:"),
    "torch_numpy": ("keras.src.backend.torch.numpy:", "keras.src.backend.torch.ops.numpy:"),
    "torch_core": ("keras.src.backend.torch.core:", "keras.src.backend.torch.ops.core:"),
    "get_device": ("keras.src.backend.torch.core:get_device", "keras.src.backend.torch.ops.core:get_device"),
    "to_torch_dtype": (
        "keras.src.backend.torch.core:to_torch_dtype",
        "keras.src.backend.torch.ops.core:to_torch_dtype",
    ),
    "jax_core": ("keras.src.backend.jax.core:", "keras.src.backend.jax.ops.core:"),
    "JaxVariable": ("keras.src.backend.jax.core:JaxVariable", "keras.src.backend.jax.ops.core:Variable"),
    "JAXTrainer": ("keras.src.backend.jax.trainer:JAXTrainer", "keras.src.backend.jax.trainer:Trainer"),
    "tensorflow_core": ("keras.src.backend.tensorflow.core:", "keras.src.backend.tensorflow.ops.core:"),
    "tensorflow_math": ("keras.src.backend.tensorflow.math:", "keras.src.backend.tensorflow.ops.math:"),
    "tensorflow_nn": ("keras.src.backend.tensorflow.nn:", "keras.src.backend.tensorflow.ops.nn:"),
    "tensorflow_numpy": ("keras.src.backend.tensorflow.numpy:", "keras.src.backend.tensorflow.ops.numpy:"),
    "TensorFlowTrainer": (
        "keras.src.backend.tensorflow.trainer:TensorFlowTrainer",
        "keras.src.backend.tensorflow.trainer:Trainer",
    ),
}


def __getattr__(name: str) -> Any:
    """Returns what a name of the tables is in this Keras.

    Where this Keras does not have it, a stand-in, so that an import does not fail: no object is an instance of it, and
    whatever else is done with it raises BackendMismatchError, which names the place.
    """
    if name in _PLACES:
        place = _PLACES[name]
    elif name in _MOVED:
        place = _MOVED[name][READ.index(nearest())]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = _resolve(place)
    except BackendMismatchError as error:
        return _Missing(name, (), {"_unidist_error": str(error)})
    globals()[name] = found
    return found


class _Missing(type):
    """The kind of the stand-ins: classes, since some names are bases of unidist's own."""

    _unidist_error: str

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is not _Missing and cls in type(instance).__mro__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise BackendMismatchError(cls._unidist_error)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BackendMismatchError(cls._unidist_error)


def nearest(version: str | None = None) -> str:
    """Returns the version of READ nearest to a Keras, or to this one: the last not newer, or the first."""
    return [READ[0], *(read for read in READ if _minor(read) <= _minor(version or keras.__version__))][-1]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _resolve(place: str) -> Any:
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split(".") if path else ():
            found = getattr(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("keras."):
            raise
        raise missing(f"{module}{'.' if path else ''}{path}") from error
    return found


def missing(place: str) -> BackendMismatchError:
    """The error of a place inside Keras that this Keras does not have."""
    versions = " or ".join(READ)
    return BackendMismatchError(
        f"unidist steps into Keras at {place}, which Keras {keras.__version__} does not have: "
        f"install keras {versions}, for which this unidist was made"
    )

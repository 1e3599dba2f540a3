"""Layers that keep numbers of the batches before: those are of whole batches, which data axes cut."""

from __future__ import annotations

from typing import Any

from unidist.errors import CapabilityError
from unidist.keras.layer_facts import overwritten
from unidist.keras.patching.compat import RNN, tree
from unidist.keras.strategies.distribution import UnidistDistribution


def refuse(model: Any, distribution: UnidistDistribution) -> None:
    """For engines that call layers with each device's own rows.

    Raises:
        CapabilityError: a layer is stateful, and the strategy cuts batches.
    """
    shards = distribution.strategy.data_shards
    if shards == 1:
        return
    for layer in model._flatten_layers():
        if isinstance(layer, RNN) and layer.stateful:
            raise CapabilityError(
                f"layer {layer.name!r} has stateful=True: it keeps a state for {_rows(layer, shards)}, and no device "
                "knows the states of the others' rows. Give the strategy a mesh whose data axis has one place (all "
                "devices on the model axis), make the layer with stateful=False, or use('jax') or use('tensorflow'), "
                "where states are those of the whole batch"
            )


def refuse_overwritten(model: Any, instead: str = "") -> None:
    """For engines that sum the gradients of several devices.

    Args:
        instead: what else can be done.

    Raises:
        CapabilityError: the gradient of a variable is its next value.
    """
    for layer in model._flatten_layers():
        for variable in overwritten(layer):
            raise CapabilityError(
                f"layer {layer.name!r} has the variable {variable.path!r} with overwrite_with_gradient=True, as "
                "those of float8 quantization are: its gradient is its next value, which each device computes of "
                f"its own rows or weights alone. {instead}Train without quantize('float8') and quantize afterwards, or "
                "use('jax') or use('tensorflow'), where it is computed of the whole batch"
            )


def refuse_in_parts(model: Any, distribution: UnidistDistribution) -> None:
    """For training, where layers may be given parts of sequences.

    Raises:
        CapabilityError: they are, and the gradient of a variable is its next value.
    """
    if distribution.strategy.sequence_parallel and distribution.strategy.mesh.size > 1:
        refuse_overwritten(model, "Leave sequence_parallel out. ")


def refuse_in_a_loop(path: str) -> None:
    """For gradients that a loop of the user's own averages over devices.

    Raises:
        CapabilityError: the gradient of this variable is its next value.
    """
    raise CapabilityError(
        f"variable {path!r} has overwrite_with_gradient=True, as those of float8 quantization are: its gradient is its "
        "next value, and a loop of your own averages gradients over the devices, each of its own rows. Train the model "
        "with fit() or train_on_batch(), where the value is computed of the whole batch"
    )


def _rows(layer: Any, shards: int) -> str:
    if layer.states is None:
        return f"each row of a batch, but each of {shards} devices gets its part of the rows alone"
    built = tree.flatten(layer.states)[0].shape[0]
    each = f"{built // shards}" if built % shards == 0 else f"at most {-(-built // shards)}"
    return f"each of the {built} rows of the batches that it was built for, but each of {shards} devices gets {each}"

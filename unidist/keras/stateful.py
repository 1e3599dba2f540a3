"""Recurrent layers that keep their states between batches: a state is of whole batches, which data axes cut."""

from __future__ import annotations

from typing import Any

from unidist.errors import CapabilityError
from unidist.keras.compat import RNN, tree
from unidist.keras.strategy import UnidistDistribution


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


def _rows(layer: Any, shards: int) -> str:
    if layer.states is None:
        return f"each row of a batch, but each of {shards} devices gets its part of the rows alone"
    built = tree.flatten(layer.states)[0].shape[0]
    each = f"{built // shards}" if built % shards == 0 else f"at most {-(-built // shards)}"
    return f"each of the {built} rows of the batches that it was built for, but each of {shards} devices gets {each}"

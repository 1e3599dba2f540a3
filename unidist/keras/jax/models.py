"""Answers what models.py asks of the driver on JAX: rows, gather_weights, parallelize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from unidist.algebra import Layout
from unidist.backends.protocol import Array
from unidist.keras.api.variable_rows import Row, rows_of
from unidist.keras.jax import layouts, placing, processes
from unidist.keras.records import model_record
from unidist.keras.records.layer_report import of_partitioned
from unidist.keras.strategies.distribution import adopt


def parallelize(model: Any, distribution: Any) -> None:
    """Places a built model, its metrics and its optimizer's slots in place.

    Raises:
        LayoutError: a rule does not fit a variable, or a strict one matches none.
    """
    model_record.adjust(model, distribution)
    placing.place_model(model, distribution)


def gather_weights(model: Any) -> Iterator[tuple[str, Array]]:
    """Yields (path, full value) of every weight in the model's order, on every process.

    A collective of the world.
    """
    for variable in model.weights:
        yield variable.path, processes.whole(variable.value)


def rows(model: Any) -> Iterator[Row]:
    """Yields a row for each variable of the model, then of its optimizer, measured from devices' shards.

    Raises:
        LayoutError: a strict rule of the model's distribution matches none of its variables.
    """
    distribution = model_record.distribution_of(model)
    if distribution is not None and model.built:
        model_record.adjust(model, distribution)
    yield from rows_of(model, _row)


def reasons(model: Any) -> Iterator[tuple[str, str]]:
    """(path, what is known of it) of each layer with cut weights: how it computes is left to the compiler."""
    distribution = placing.distribution_of(model)
    if distribution is None or not model.built:
        return

    def layouts_of(variable: Any) -> tuple[Layout, Layout]:
        found = layouts.placement(variable, distribution)
        return layouts.of_native(found.storage), layouts.of_native(found.compute)

    yield from of_partitioned(model, layouts_of, adopt(distribution).strategy.data_axes, "XLA's partitioner")


def _row(variable: Any, kind: str) -> Row:
    value: jax.Array = variable.value
    held: dict[Any, int] = {}
    for shard in value.addressable_shards:
        held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    first = min(value.addressable_shards, key=lambda shard: shard.device.id)
    distributed = isinstance(value.sharding, NamedSharding)
    return Row(
        path=variable.path,
        shape=tuple(value.shape),
        dtype=str(value.dtype),
        layout=layouts.of_native(value.sharding) if distributed else None,
        local_shape=tuple(first.data.shape),
        bytes_per_device=max(held.values()),
        kind=kind,
    )

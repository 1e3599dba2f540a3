"""Answers what models.py asks of the DTensor engine: rows, gather_weights, parallelize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorflow.experimental import dtensor

from unidist.algebra import Layout
from unidist.backends.protocol import Array, itemsize
from unidist.keras.api.variable_rows import Row, rows_of
from unidist.keras.records import model_record, variable_record
from unidist.keras.records.layer_report import of_partitioned
from unidist.keras.tensorflow import placing, values, worlds


def parallelize(model: Any, distribution: Any) -> None:
    """Places a built model, its metrics and its optimizer's slots in place.

    Raises:
        LayoutError: a rule does not fit a variable, or a strict one matches none.
        CapabilityError: a layout that DTensor has not.
    """
    model_record.adjust(model, distribution)
    placing.place_model(model, distribution)


def gather_weights(model: Any) -> Iterator[tuple[str, Array]]:
    """Yields (path, full value) of every weight in the model's order, on every process.

    A collective of the world.
    """
    _place(model)
    for variable in model.weights:
        with worlds.telling("gather_weights"):
            found = values.whole(variable._value)
        yield variable.path, found


def rows(model: Any) -> Iterator[Row]:
    """Yields a row for each variable of the model, then of its optimizer, measured from devices' shards."""
    _place(model)
    yield from rows_of(model, _row)


def reasons(model: Any) -> Iterator[tuple[str, str]]:
    """Yields (path, what is known of it) of each layer with cut weights.

    How it computes with shards is DTensor's choice.
    """
    distribution = placing.placed_under(model)
    if distribution is None:
        return

    def layouts(variable: Any) -> tuple[Layout, Layout]:
        found = variable_record.of(variable).layouts
        return (found.storage, found.compute) if found is not None else (Layout(), Layout())

    refused = "DTensor is given shards of the weights of products and look-ups alone"
    yield from of_partitioned(model, layouts, distribution.strategy.data_axes, "DTensor", refused)


def _place(model: Any) -> None:
    """Places what was made under a scope on its mesh at its first use; this is one."""
    distribution = placing.distribution_of(model)
    if distribution is not None and model.built:
        model_record.adjust(model, distribution)
        placing.place_model(model, distribution)


def _row(variable: Any, kind: str) -> Row:
    shape, dtype = tuple(variable.shape), str(variable.dtype)
    layouts = variable_record.of(variable).layouts
    spread = isinstance(variable._value, values.SpreadVariable)
    held = [tuple(part.shape) for part in dtensor.unpack(variable._value.read_value())] if spread else [shape]
    sizes = []
    for local in held:
        size = itemsize(dtype) if dtype != "string" else 0
        for n in local:
            size *= n
        sizes.append(size)
    return Row(
        path=variable.path,
        shape=shape,
        dtype=dtype,
        layout=None if layouts is None else layouts.storage,
        local_shape=held[0],
        bytes_per_device=max(sizes),
        kind=kind,
    )

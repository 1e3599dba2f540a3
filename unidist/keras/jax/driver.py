"""The functions of this package that unidist.keras.driver.Driver names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from unidist.algebra import Layout
from unidist.backends import registry
from unidist.backends.jax.virtual import prepare_devices
from unidist.backends.protocol import Array
from unidist.keras import saving as keras_saving
from unidist.keras.driver import Row, rows_of
from unidist.keras.jax import layouts, placing, saving
from unidist.keras.jax import processes as _processes
from unidist.keras.jax.experts.stacks import TOLD
from unidist.keras.jax.hooks import table as table
from unidist.keras.jax.saving import held as held
from unidist.keras.records import model_record
from unidist.keras.records.layer_report import of_partitioned
from unidist.keras.strategies.distribution import adopt
from unidist.planner.layout_map import LayoutMap
from unidist.strategies import Strategy

RUNS_PROGRAMS = True
world = _processes.processes
processes = saving.processes_of


def prepare() -> None:
    """Makes JAX's virtual CPU devices the simulator's ranks; they are counted each time it is chosen.

    Raises:
        BackendMismatchError: JAX runs with fewer devices already.
    """
    if registry.in_use().virtual:
        prepare_devices(len(registry.current().list_devices()))


def check(strategy: Strategy, layout_map: LayoutMap | None) -> None:
    """There is no strategy that cannot be trained."""


def leave() -> None:
    """Arrays and their layouts stay JAX's: a model of one process can be trained by Keras alone."""


def writing(model: Any, write: Callable[[], Any], read_along: Callable[[], Any]) -> Any:
    """One process writes for all: see `saving.by_first`. The others need not read along."""
    return keras_saving.by_first(model, world(), saving.gathered, write)


def rehearse(*step: object) -> str:
    """Says why traffic is an estimate."""
    contexts = any(isinstance(one, Strategy) and one.context_axes for one in step)
    besides = ", and what attention reads of other devices' places is not in it" if contexts else ""
    return f"Keras on JAX leaves it to a compiler what is sent{besides}"


def parallelize(model: Any, distribution: Any) -> None:
    """Places a built model, its metrics and its optimizer's slots in place.

    Raises:
        LayoutError: a rule does not fit a variable, or a strict one matches none.
    """
    model_record.adjust(model, distribution)
    placing.place_model(model, distribution)


def ready(model: Any) -> None:
    """Places a built model, its optimizer and its metrics, if it is distributed."""
    distribution = placing.distribution_of(model)
    if distribution is not None:
        parallelize(model, distribution)


def gather_weights(model: Any) -> Iterator[tuple[str, Array]]:
    """Yields (path, full value) of every weight in the model's order, on every process.

    A collective of the world.
    """
    for variable in model.weights:
        yield variable.path, _processes.whole(variable.value)


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

    for layer in model._flatten_layers():
        if said := vars(layer).get(TOLD):
            yield layer.path or layer.name, said
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

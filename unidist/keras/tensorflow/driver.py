"""The functions of this package that unidist.keras.driver.Driver names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.backends import registry
from unidist.backends.protocol import Array, itemsize
from unidist.checkpoint.shares import Share
from unidist.errors import MeshError
from unidist.keras import saving as keras_saving
from unidist.keras.checkpoint.held import Held, OnMesh, Read, Whole, words
from unidist.keras.consistency.processes import Processes
from unidist.keras.driver import Row, rows_of
from unidist.keras.records import model_record, variable_record
from unidist.keras.records.layer_report import of_partitioned
from unidist.keras.tensorflow import hooks, placing, values, worlds
from unidist.keras.tensorflow.hooks import table as table
from unidist.planner.layout_map import LayoutMap
from unidist.strategies import Strategy

RUNS_PROGRAMS = True
world = worlds.processes


def prepare() -> None:
    """Makes TensorFlow's virtual CPU devices the simulator's ranks, counted each time it is chosen.

    Raises:
        BackendMismatchError: TensorFlow runs with other devices already.
    """
    if registry.in_use().virtual:
        worlds.backend()


def check(strategy: Strategy, layout_map: LayoutMap | None) -> None:
    """Raises MeshError for a mesh that leaves processes out, which all of them see alike."""
    if worlds.several() and (outside := worlds.backend().without_rank(strategy.mesh)):
        raise MeshError(
            f"{strategy.mesh} has no rank of process {outside[0]}: with Keras on TensorFlow every process of the world "
            "takes part in training; name devices of each, or start fewer processes"
        )


def leave() -> None:
    """Variables stay DTensor's, which TensorFlow refuses to read outside of a mesh."""


def writing(model: Any, write: Callable[[], Any], read_along: Callable[[], Any]) -> Any:
    """One process writes for all: see `saving.by_first`. The others need not read along."""
    several = world() if model is None else hooks.holding(model)
    return keras_saving.by_first(model, several, hooks.gathered, write)


def rehearse(*step: object) -> str:
    """Says why traffic is an estimate."""
    return "Keras on TensorFlow leaves it to DTensor what is sent"


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


def ready(model: Any) -> None:
    """Places a built model, its optimizer and its metrics, if it is distributed."""
    distribution = placing.distribution_of(model)
    if distribution is not None:
        placing.prepare(model, distribution)


def processes(model: Any) -> Processes | None:
    """Returns the processes that hold the model together, if there are several."""
    return world() if placing.is_placed(model) else None


def held(variable: Any) -> Held:
    """A variable, as the devices of this process hold it."""
    record = variable_record.of(variable)
    if not isinstance(variable._value, values.SpreadVariable) or record.layouts is None:
        return Whole(variable)
    shape = tuple(int(n) for n in variable.shape)
    return Stored(variable, Sharding(worlds.in_order(record.distribution.mesh), record.layouts.storage, shape))


class Stored(OnMesh):
    """A variable on a mesh."""

    @property
    def _ranks(self) -> list[int]:
        return [rank for rank in worlds.backend().local_ranks() if rank in self.sharding.mesh.devices]

    # Looked at where a variable is saved: one that is restored lets its former value go.
    @cached_property
    def _shards(self) -> dict[int, tf.Tensor]:
        return dict(zip(self._ranks, dtensor.unpack(self.variable._value.read_value()), strict=True))

    def part(self, rank: int) -> Array:
        return words(self._shards[rank].numpy())

    def exchanged(self, share: Share) -> Iterator[tuple[int, Array]]:
        """DTensor moves on the whole mesh at once."""
        backend, dim = worlds.backend(), share.dim
        before = (slice(None),) * dim
        for start, stop, writers in share.together():
            source, target = share.exchange(self.sharding.mesh, stop - start)
            parts = [self._shards[rank][(*before, slice(start, stop))] for rank in self._ranks]
            with events.for_purpose(f"saving {self.variable.path}"):
                moved = backend.redistribute(backend.from_local(parts, source), source, target)
            for rank, rows in backend.to_local(moved, target).items():
                if rank in writers:
                    first = self.sharding.region(rank)[dim][0] + start
                    yield first + target.region(rank)[dim][0], words(rows.numpy())

    def put(self, read: Read) -> None:
        parts = [tf.constant(value) for value in self.values(self._ranks, read)]
        self.variable._value.assign(dtensor.pack(parts, self.variable._value.layout))

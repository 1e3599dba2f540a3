"""The functions of this package that unidist.keras.driver.Driver names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from unidist import session
from unidist.algebra import Mesh
from unidist.backends.protocol import Array
from unidist.keras.consistency.processes import Processes
from unidist.keras.driver import Row
from unidist.keras.planning.auto_layouts import waits
from unidist.keras.records import model_record
from unidist.keras.records.layer_report import in_parts, own_variables
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.torch import data, devices, engine
from unidist.keras.torch.hooks import table as table
from unidist.keras.torch.hooks import writing as writing
from unidist.keras.torch.layers import rules
from unidist.keras.torch.params import placing, torch_optimizers
from unidist.keras.torch.params.host_memory import HostStorage
from unidist.keras.torch.params.placing import is_placed
from unidist.keras.torch.rehearsal import rehearse as rehearse
from unidist.keras.torch.states import held as held
from unidist.keras.torch.states import processes as processes
from unidist.keras.torch.states import ready as ready
from unidist.keras.torch.world import leave_worlds, rank_world
from unidist.planner.layout_map import LayoutMap
from unidist.strategies import Strategy

RUNS_PROGRAMS = False


def prepare() -> None:
    """Keras computes on the device of the adapter in use. (Asked again when a world is joined.)"""
    devices.settle()
    torch_optimizers.watch()


def check(strategy: Strategy, layout_map: LayoutMap | None) -> None:
    """Refuses nothing: there is no strategy that cannot be trained.

    Keras computes where the adapter does: its world may be one that the program made after `use`.
    """
    devices.settle()


def leave() -> None:
    """Models that are distributed raise from here on, where they would train alone."""
    leave_worlds()
    devices.put_back()
    torch_optimizers.leave()


def world() -> Processes | None:
    """Returns the processes of the world, if there are several."""
    count = session.backend().process_count()
    return data.processes(rank_world(Mesh({"world": count}), ())) if count > 1 else None


def parallelize(model: Any, distribution: UnidistDistribution) -> None:
    """Places a built model, its optimizer and its metrics, in place.

    Keras calls a model built whose layers it builds from the first batch. Without variables, or where layouts are found
    from all of them, it is placed then.
    """
    found = engine.engine_for(model, distribution)
    if model.variables and (placing.is_built(model) or not waits(model, distribution)):
        with found.session():
            found.prepare()


def rows(model: Any) -> list[Row]:
    """One row for each variable of the model and of its built optimizer, measured from the tensors held.

    No collective: one process may ask alone.

    Raises:
        LayoutError: a strict rule of the model's distribution matches none of its variables.
    """
    found = engine.engine_of(model)
    if found is not None and model.built:
        model_record.adjust(model, found.distribution)
    optimizer = getattr(model, "optimizer", None)
    slots = list(optimizer.variables) if optimizer is not None and optimizer.built else []
    return [*(_row(v, "weights") for v in model.variables), *(_row(v, "slots") for v in slots)]


def reasons(model: Any) -> Iterator[tuple[str, str]]:
    """Yields (name, whether it looks at several shards' rows) of what may look.

    Then come (name, how often) of operations that gather, and (path, what it does) of each layer with cut weights. With
    jit_compile=True steps come first: programs, or why they are none.
    """
    found = engine.engine_of(model)
    if found is not None and found.whole_steps is not None:
        yield from found.whole_steps.told()
    for border in found.borders if found is not None else ():
        yield border.name, border.why
    for name, count in found.gathers.counts.items() if found is not None else ():
        yield f"operation {name}", f"no rule cuts it: it has gathered its operands {count} times"
    if found is None or not model.built:
        return
    is_waiting = found.traffic is None and waits(model, found.distribution)
    for layer in model._flatten_layers():
        if (dispatch := vars(layer).get(rules.DISPATCH)) is not None and dispatch.told:
            yield layer.path or layer.name, dispatch.told
    ruled = {id(rule.layer): rule for rule in found.rules}
    for layer in model._flatten_layers():
        resting = [v for v in own_variables(layer) if is_placed(v) and v._storage.shardings.stored.layout.dims]
        if not resting:
            continue
        rule = ruled.get(id(layer)) or rules.make_rule(layer)
        if is_waiting:
            text = "its layouts are found in the first step"
        elif rule is not None:
            text = rules.told(rule)
        else:
            text = in_parts(resting)
        yield layer.path or layer.name, text


def _row(variable: Any, kind: str) -> Row:
    held = getattr(variable, "_storage", None)
    if held is None:
        value = variable.value
        shape = tuple(value.shape)
        return Row(variable.path, shape, str(variable.dtype), None, shape, value.nbytes, kind, _gradient_bytes([value]))
    shards = list(held.shards.values())
    first = shards[0]
    nbytes = max(shard.numel() * shard.element_size() for shard in shards)
    is_on_host = isinstance(held, HostStorage)
    return Row(
        path=variable.path,
        shape=held.shardings.stored.shape,
        dtype=str(variable.dtype),
        layout=held.shardings.stored.layout,
        local_shape=tuple(first.shape),
        bytes_per_device=0 if is_on_host else nbytes,
        kind=kind,
        gradient_bytes=_gradient_bytes(held.states.values()),
        host_bytes=nbytes if is_on_host else 0,
    )


def _gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return max(p.grad.nbytes if p.is_leaf and p.grad is not None else 0 for p in parameters)


def gather_weights(model: Any) -> list[tuple[str, Array]]:
    """(path, full value) of every weight, on every process."""
    return [(v.path, np.asarray(v)) for v in model.weights]

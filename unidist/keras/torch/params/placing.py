"""Placing variables: at their creation inside a scope, and those of a model that was built before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from unidist import events
from unidist.algebra import Layout, Sharding
from unidist.array import as_layout
from unidist.errors import LayoutError
from unidist.keras.patching.compat import backend, in_stateless_scope
from unidist.keras.patching.patches import Hook
from unidist.keras.records import model_record, variable_record
from unidist.keras.strategies import distribution as distributions
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.torch import outside
from unidist.keras.torch.context import frame, left
from unidist.keras.torch.params import torch_optimizers
from unidist.keras.torch.params.host_memory import HostStorage
from unidist.keras.torch.params.storage import Shardings, Storage
from unidist.keras.torch.params.variables import DistributedVariable, lay, place
from unidist.keras.torch.world import RankWorld, rank_world
from unidist.strategies import Strategy, VariableLayouts


def world_of(distribution: UnidistDistribution) -> RankWorld:
    return rank_world(distribution.mesh, distribution.strategy.data_axes)


def is_placed(variable: Any) -> bool:
    return isinstance(variable, DistributedVariable)


def place_new(variable: Any) -> None:
    """Places a variable that was just made, if a distribution is active; a slot with its variable."""
    if is_placed(variable) or in_stateless_scope() or variable._value is None or frame() is not None:
        return
    if variable._value.is_meta:
        return
    owner = variable_record.of_new(variable).owner
    distribution = distributions.current() if owner is None else variable_record.of(owner).distribution
    if distribution is not None:
        _place(variable, distribution, variable._trainable)


def _place(
    variable: Any,
    distribution: UnidistDistribution,
    is_weight: bool,
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    if variable._layout is not None:
        variable_record.note_given(variable, distribution.mesh, as_layout(variable._layout))
    is_on_host = distribution.strategy.offload == "states" and variable_record.owner_of(variable) is not None
    kind = HostStorage if is_on_host else Storage
    place(variable, world_of(distribution), shardings_of(variable, distribution, is_weight), prepare=prepare, kind=kind)
    variable_record.of(variable).distribution = distribution


def shardings_of(variable: Any, distribution: UnidistDistribution, is_weight: bool) -> Shardings:
    """Returns how a variable is laid out.

    Args:
        is_weight: it is trained, or was before it was frozen. What is not (moving statistics, seeds, counters) is
            small, read in every step and has no gradient.
    """
    strategy, summed = distribution.strategy, None
    if variable_record.is_state_of_metric(variable):
        is_weight, summed = False, Layout(partial=strategy.data_axes if variable.aggregation == "sum" else ())
    found = variable_record.layouts_of(variable, distribution, is_weight=is_weight, otherwise=summed)
    return Shardings.by(_without_idle_axes(found, strategy), distribution.mesh, tuple(variable.shape))


def _without_idle_axes(layouts: VariableLayouts, strategy: Strategy) -> VariableLayouts:
    """Drops data axes of one place from the dims, as keras_hub's maps have without data parallelism.

    Such a shard is the whole, and nothing is fetched or reduced for it.
    """
    idle = {axis for axis in strategy.data_axes if strategy.mesh.axis_size(axis) == 1}

    def lean(layout: Layout) -> Layout:
        if not idle & set(layout.sharded_axes):
            return layout
        dims = (tuple(axis for axis in axes if axis not in idle) for axes in layout.dims)
        return Layout(*dims, partial=dict(layout.partial), fanout=layout.fanout)

    return VariableLayouts(lean(layouts.storage), lean(layouts.compute), lean(layouts.state))


def _trained(model: Any) -> set[int]:
    return {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}


def place_model(model: Any, distribution: UnidistDistribution) -> None:
    """Places every variable of a model, its optimizer and its metrics that is not placed yet.

    Values that differ between processes become those of rank 0.

    Raises:
        LayoutError: a strict rule matches no variable, or one does not fit.
    """
    world = world_of(distribution)
    model_record.adjust(model, distribution)
    trained = _trained(model)

    def place_all(variables: Iterable[Any]) -> None:
        for variable in _unplaced(variables):
            _place(variable, distribution, id(variable) in trained, prepare=lambda x: _from_first(x, world))

    place_all(model.variables)
    for variable in model.variables:
        variable_record.of(variable).is_settled = True
    optimizer = getattr(model, "optimizer", None)
    # Where layers are yet to be built it would know some variables only: Keras builds both from the first batch.
    if optimizer is not None and not optimizer.built and is_built(model):
        optimizer.build(model.trainable_variables)
    variable_record.note_slots(optimizer)
    place_all([*_optimizer_variables(model), *model.metrics_variables])
    for layer in model._flatten_layers():
        if hasattr(layer, "_torch_params"):
            layer._track_variables()


def is_built(model: Any) -> bool:
    """Returns whether Keras has nothing left of a model to build from a first batch."""
    return bool(model.variables) and all(layer.built for layer in model._flatten_layers())


def place_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Builds and places an optimizer that a train_step brings along, beside or in place of the model's."""
    if optimizer.built and not _unplaced(optimizer.variables):
        return
    built_in = (found for v in variables if (found := variable_record.of(v).distribution) is not None)
    distribution = distributions.current() or next(built_in, None)
    if distribution is None:
        return
    with left(), distribution.scope():
        if not optimizer.built:
            with backend.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
        variable_record.note_slots(optimizer)
        for variable in _unplaced(optimizer.variables):
            _place(variable, distribution, is_weight=False)


def move_model(model: Any, distribution: UnidistDistribution) -> None:
    """Moves a model's placed variables, and its optimizer's slots, to where the strategy says now.

    They go one by one, so that one whole variable exists at a time. What a trainer is prepared for stays: its rules,
    its buckets and its optimizer's slots are of this place. A collective of the mesh.
    """
    world = world_of(distribution)
    trained = _trained(model)
    for variable in model.variables:
        if is_placed(variable) and not variable_record.of(variable).is_settled and not variable._storage.layout.partial:
            _move(variable, world, shardings_of(variable, distribution, id(variable) in trained))
    for slot in _optimizer_variables(model):
        if is_placed(slot) and variable_record.owner_of(slot) is not None:
            _move(slot, world, shardings_of(slot, distribution, is_weight=False))


def _move(variable: Any, world: RankWorld, shardings: Shardings) -> None:
    if variable._storage.shardings == shardings:
        return
    before = variable._storage
    value = before.whole(None).detach()
    held = type(before)(world, shardings, variable.path)
    held.fill(value, trainable=outside.follow_torch(before))
    held.follow(before)
    for parameter in (*before.shards.values(), *before.leaves.values(), *before.states.values()):
        torch_optimizers.note_replaced(parameter, variable.path)
    lay(variable, held)


def check_meshes(model: Any) -> None:
    """Checks that what a model trains is on one mesh.

    A part that it does not train, as a teacher, may be on another.

    Raises:
        LayoutError: its layers were distributed over two, or what a layer needs would be fetched over another.
    """
    placed = list(filter(is_placed, model.variables))
    trained = [*filter(is_placed, model.trainable_variables), *placed][:1]
    for variable in placed:
        first, own = trained[0]._storage.world, variable._storage.world
        if (own.mesh, own.data_axes) == (first.mesh, first.data_axes):
            continue
        remedy = "Save the part that came first and load it in the scope of the new strategy"
        if variable.trainable:
            raise LayoutError(
                f"model {model.name!r} trains variables on two meshes: {trained[0].path!r} on {first.mesh}, "
                f"{variable.path!r} on {own.mesh}. {remedy}, or set trainable=False on it"
            )
        if not variable._storage.is_kept:
            raise LayoutError(
                f"model {model.name!r} is on {first.mesh}, and its {variable.path!r} is stored by zero=3 on "
                f"{own.mesh}. {remedy}"
            )


def equalize(variables: Iterable[Any], world: RankWorld) -> None:
    """Makes replicas equal on all processes: unseeded initial values are rank 0's on replicated axes."""
    if world.is_virtual:
        return
    for variable in variables:
        stored = variable._storage.shardings.stored
        axes = tuple(a for a in world.mesh.axis_names if stored.layout.state(a) in ("I", "F"))
        if axes and world.mesh.axis_size(axes) > 1 and not stored.layout.partial:
            with torch.no_grad(), events.for_purpose("first weights"):
                shard = variable._storage.parameter()
                shard.copy_(world.backend.broadcast(shard.detach(), stored, axes, 0))


def _from_first(value: torch.Tensor, world: RankWorld) -> torch.Tensor:
    if world.is_virtual:
        return value
    whole = Sharding(world.mesh, Layout(), tuple(value.shape))
    with events.for_purpose("first weights"):
        return world.backend.broadcast(value, whole, world.mesh.axis_names, 0)


def _unplaced(variables: Iterable[Any]) -> list[Any]:
    seen: dict[int, Any] = {id(v): v for v in variables if not is_placed(v)}
    return list(seen.values())


def _optimizer_variables(model: Any) -> list[Any]:
    return list(model.optimizer.variables) if getattr(model, "optimizer", None) is not None else []


def hooks() -> tuple[Hook, ...]:
    """Returns hooks that place new variables of the torch backend as soon as they have a value.

    So at most one whole value exists at a time.
    """
    why = "a variable is placed as soon as it has a value"
    return (
        Hook(backend.Variable, "__init__", _placing, why),
        Hook(backend.Variable, "_deferred_initialize", _placing, why),
    )


def _placing(original: Any) -> Any:
    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        place_new(self)

    return initialize

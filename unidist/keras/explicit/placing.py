"""Placing variables: at their creation inside a scope, and those of a model that was built before."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from unidist.algebra import Layout, Sharding
from unidist.array import as_layout
from unidist.keras import strategy as strategies
from unidist.keras.compat import BaseOptimizer, backend, in_stateless_scope
from unidist.keras.explicit.context import frame, left
from unidist.keras.explicit.places import Lies, Place
from unidist.keras.explicit.variables import DistributedVariable, PlacedLayout, place
from unidist.keras.explicit.world import RankWorld, rank_world
from unidist.keras.interception import Hook
from unidist.keras.strategy import UnidistDistribution
from unidist.strategies import Strategy, VariableLayouts


def world_of(distribution: UnidistDistribution) -> RankWorld:
    return rank_world(distribution.mesh, distribution.strategy.data_axes)


def is_placed(variable: Any) -> bool:
    return isinstance(variable, DistributedVariable)


def place_new(variable: Any) -> None:
    """Places a variable that was just made, if a distribution is active (or its reference variable is placed)."""
    if is_placed(variable) or in_stateless_scope() or variable._value is None or frame() is not None:
        return
    if variable._value.is_meta:
        return
    given = variable._layout
    if isinstance(given, PlacedLayout):
        world = _world_of_sharding(given.state)
        if world is not None:
            place(variable, world, Lies.alike(given.state))
        return
    distribution = strategies.current()
    if distribution is not None:
        place(variable, world_of(distribution), lies_of(variable, distribution, variable._trainable))
        variable._unidist_distribution = distribution


# The worlds by their meshes: a slot finds the world of the variable it belongs to by its sharding alone.
_worlds: dict[Any, RankWorld] = {}


def _world_of_sharding(sharding: Sharding) -> RankWorld | None:
    return _worlds.get(sharding.mesh)


def lies_of(variable: Any, distribution: UnidistDistribution, is_weight: bool) -> Lies:
    """How a variable lies: by its own layout, as a metric's state (summed on reading), or by the strategy.

    Args:
        is_weight: it is trained, or was before it was frozen. What is not (moving statistics, seeds, counters) lies as
            the layout rules say, the same for all purposes: it is small, read in every step and has no gradient.
    """
    world = world_of(distribution)
    _worlds[distribution.mesh] = world
    mesh, shape = distribution.mesh, tuple(variable._value.shape)
    if variable._layout is not None:
        given = variable._layout
        if isinstance(given, PlacedLayout):
            return Lies.alike(given.state)
        return Lies.alike(Sharding(mesh, as_layout(given), shape))
    if variable.synchronization == "on_read":
        axes = distribution.strategy.data_axes if variable.aggregation == "sum" else ()
        return Lies.alike(Sharding(mesh, Layout(partial=axes), shape))
    return _ruled(variable.path, shape, distribution, is_weight)


def _ruled(path: str, shape: tuple[int, ...], distribution: UnidistDistribution, is_weight: bool) -> Lies:
    strategy = distribution.strategy
    if not is_weight:
        return Lies.alike(Sharding(distribution.mesh, strategy.rule(path, shape), shape))
    return Lies.by(_without_idle_axes(strategy.variable(path, shape), strategy), distribution.mesh, shape)


def _without_idle_axes(layouts: VariableLayouts, strategy: Strategy) -> VariableLayouts:
    """Without data axes of one place in the dims, as keras_hub's maps have on a mesh without data parallelism: such a
    shard is the whole, and nothing is fetched or reduced for it."""
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
    _worlds[distribution.mesh] = world
    weights = list(model.variables)
    distribution.check_model([v.path for v in weights])

    trained = _trained(model)

    def place_all(variables: Iterable[Any]) -> None:
        for variable in _unplaced(variables):
            reference = _reference_of(variable, model)
            if reference is not None:
                variable._layout = reference._layout
            lies = lies_of(variable, distribution, id(variable) in trained)
            place(variable, world, lies, prepare=lambda x: _from_first(x, world))

    place_all(weights)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    place_all([*_optimizer_variables(model), *model.metrics_variables])
    for layer in model._flatten_layers():
        if hasattr(layer, "_torch_params"):
            layer._track_variables()


def place_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Builds and places an optimizer that a train_step brings along, beside or in place of the model's."""
    if optimizer.built and not _unplaced(optimizer.variables):
        return
    built_in = (v._unidist_distribution for v in variables if hasattr(v, "_unidist_distribution"))
    distribution = strategies.current() or next(built_in, None)
    if distribution is None:
        return
    with left(), distribution.scope():
        if not optimizer.built:
            with backend.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
        for variable in _unplaced(optimizer.variables):
            reference = _owner_of(variable, optimizer)
            if reference is not None:
                variable._layout = reference._layout
            place(variable, world_of(distribution), lies_of(variable, distribution, is_weight=False))


def move_model(model: Any, distribution: UnidistDistribution) -> None:
    """Moves the placed variables of a model, and its optimizer's slots, to where the strategy says now: one by one,
    so that one whole variable exists at a time. A collective of the mesh."""
    world = world_of(distribution)
    trained = _trained(model)
    for variable in model.variables:
        if is_placed(variable) and not variable._place.layout.partial:
            shape = variable._place.lies.stored.shape
            _move(variable, world, _ruled(variable.path, shape, distribution, id(variable) in trained))
    for slot in _optimizer_variables(model):
        reference = _reference_of(slot, model) if is_placed(slot) else None
        if reference is not None:
            _move(slot, world, Lies.alike(reference._place.lies.state))


def _move(variable: Any, world: RankWorld, lies: Lies) -> None:
    if variable._place.lies == lies:
        return
    value = variable._place.whole(None).detach()
    held = Place(world, lies, variable.path)
    held.fill(value, trainable=variable._trainable)
    variable._place = held
    variable._layout = PlacedLayout(lies.stored, lies.state)


def equalize(variables: Iterable[Any], world: RankWorld) -> None:
    """Makes replicas equal on all processes: unseeded initial values are rank 0's along each replicated axis."""
    if world.is_virtual:
        return
    for variable in variables:
        stored = variable._place.lies.stored
        axes = tuple(a for a in world.mesh.axis_names if stored.layout.state(a) in ("I", "F"))
        if axes and world.mesh.axis_size(axes) > 1 and not stored.layout.partial:
            with torch.no_grad():
                shard = variable._place.parameter()
                shard.copy_(world.backend.broadcast(shard.detach(), stored, axes, 0))


def _from_first(value: torch.Tensor, world: RankWorld) -> torch.Tensor:
    if world.is_virtual:
        return value
    whole = Sharding(world.mesh, Layout(), tuple(value.shape))
    return world.backend.broadcast(value, whole, world.mesh.axis_names, 0)


def _unplaced(variables: Iterable[Any]) -> list[Any]:
    seen: dict[int, Any] = {id(v): v for v in variables if not is_placed(v)}
    return list(seen.values())


def _optimizer_variables(model: Any) -> list[Any]:
    return list(model.optimizer.variables) if getattr(model, "optimizer", None) is not None else []


def _reference_of(slot: Any, model: Any) -> Any:
    """The placed model variable that an optimizer's slot belongs to, found as Keras names slots."""
    return _owner_of(slot, getattr(model, "optimizer", None))


def _owner_of(slot: Any, optimizer: Any) -> Any:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner is None or not getattr(inner, "built", False):
        return None
    if not any(slot is v for v in inner.variables):
        return None
    owner = getattr(slot, _REFERENCE, lambda: None)()
    if owner is None:
        # Made before the hooks. The name of one variable may begin that of another.
        named = [v for v in inner._trainable_variables if slot.name.startswith(v.path.replace("/", "_") + "_")]
        owner = max(named, key=lambda v: len(v.path), default=None)
    same = owner is not None and tuple(slot.shape) == tuple(owner.shape)
    return owner if same and is_placed(owner) else None


def _adding_slot(original: Any) -> Any:
    """Optimizer.add_variable_from_reference: notes whose slot it is."""

    @functools.wraps(original)
    def add_variable_from_reference(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        slot = original(self, reference_variable, *args, **kwargs)
        setattr(slot, _REFERENCE, weakref.ref(reference_variable))
        return slot

    return add_variable_from_reference


_REFERENCE = "_unidist_reference"


def hooks() -> tuple[Hook, ...]:
    """New variables of the torch backend are placed as soon as they have a value: at most one whole value exists at a
    time. Optimizers note whose slots they make."""
    why = "a variable is placed as soon as it has a value"
    return (
        Hook(BaseOptimizer, "add_variable_from_reference", _adding_slot, "slots know their variables"),
        Hook(backend.Variable, "__init__", _placing, why),
        Hook(backend.Variable, "_deferred_initialize", _placing, why),
    )


def _placing(original: Any) -> Any:
    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        place_new(self)

    return initialize

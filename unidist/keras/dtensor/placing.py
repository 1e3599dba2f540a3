"""Which strategy a model trains under, and how its variables become DTensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist.algebra import Layout
from unidist.array import as_layout
from unidist.keras import placed, sessions
from unidist.keras.compat import RNN, random_seed_dtype, tree
from unidist.keras.dtensor import values, worlds
from unidist.keras.planning.candidates import candidate
from unidist.keras.planning.settling import to_place
from unidist.keras.strategy import UnidistDistribution, adopt, current
from unidist.keras.telling import applied
from unidist.strategies import VariableLayouts


def distribution_of(model: Any) -> UnidistDistribution | None:
    """The active distribution, else the one that the model was told: in an entrance it is where it will lie."""
    found = current()
    if found is not None:
        return found
    before = sessions.of(model).told
    return None if before is None else adopt(before)


def is_placed(model: Any) -> bool:
    return any(_is_spread(variable) for variable in model.variables)


def _is_spread(variable: Any) -> bool:
    return placed.of(variable).distribution is not None


def place_model(model: Any, distribution: UnidistDistribution) -> None:
    """Makes DTensors of what is not yet one under the distribution: variables, metrics, the optimizer's slots.

    Compiled steps are dropped where anything moved.

    Raises:
        LayoutError: a rule does not fit a variable, or a strict one matches none.
        CapabilityError: a layout that DTensor has not.
    """
    strangers = [*to_place(model, distribution), *_states(model)]
    sessions.of(model).told = distribution
    if not strangers:
        return
    ruled = {id(variable) for variable in model.weights}
    gathered = _read_whole(model)
    for variable in strangers:
        found = _layouts_of(variable, distribution, id(variable) in ruled)
        if id(variable) in gathered:
            found = replace(found, compute=Layout())
        _place_variable(variable, found, distribution)
    _key_anew(getattr(model, "optimizer", None))
    model.train_function = model.test_function = model.predict_function = None
    applied(model, distribution)


def _states(model: Any) -> list[Any]:
    """States of recurrent layers that are not placed yet: Keras does not count them as variables of the model. A plain
    tf.Variable would be read and written by each device at its own time."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, RNN) and layer.states is not None]
    return [state for layer in layers for state in tree.flatten(layer.states) if not _is_spread(state)]


def _read_whole(model: Any) -> set[int]:
    """Variables that are gathered when they are read: all but the kernels, tables and biases of products and lookups,
    whose ops DTensor runs on shards. (Others it refuses, as a slice of a table of positions that cuts it anew.)"""
    on_shards = {id(variable) for layer in model._flatten_layers() for variable in _used_as_shards(layer)}
    return {id(variable) for variable in model.variables} - on_shards


def _used_as_shards(layer: Any) -> list[Any]:
    found = candidate(layer)
    return found.variables if found is not None and found.kind in ("product", "table") else []


def _layouts_of(variable: Any, distribution: UnidistDistribution, ruled: bool) -> VariableLayouts:
    if variable._layout is not None and placed.of(variable).given is None:
        placed.note_given(variable, distribution.mesh, as_layout(variable._layout))
    is_weight = ruled and str(variable.dtype) != random_seed_dtype()
    return placed.layouts_of(variable, distribution, is_weight=is_weight, otherwise=Layout())


def _place_variable(variable: Any, found: VariableLayouts, distribution: UnidistDistribution) -> None:
    record = placed.of(variable)
    record.distribution, record.layouts = distribution, found
    value = variable._value
    if value is None:
        return
    storage, compute, state = (
        worlds.native_layout(layout, tuple(variable.shape), distribution.mesh)
        for layout in (found.storage, Layout(*found.compute.dims), found.state)
    )
    host = values.whole(value)
    if worlds.several() and not isinstance(value, dtensor.DVariable):
        # Made on its own in each process: the seeds may have differed.
        host = worlds.from_first(host)
    with dtensor.default_mesh(storage.mesh):
        spread = values.SpreadVariable(values.put(host, storage), trainable=variable.trainable, name=variable.name)
    spread.compute, spread.state = compute, state
    variable._value = spread


def place_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Builds and places an optimizer that is none of the model's own: a train_step may have several, of which Keras
    knows one. While a step is traced, outside of its program."""
    distribution = next((found for v in variables if (found := placed.of(v).distribution) is not None), None)
    if distribution is None or (optimizer.built and all(map(_is_spread, optimizer.variables))):
        return
    # Not on DTensor's device, where a step is traced.
    with tf.init_scope(), tf.device("CPU:0"):
        if not optimizer.built:
            optimizer.build(variables)
        placed.note_slots(optimizer)
        for variable in optimizer.variables:
            if not _is_spread(variable):
                _place_variable(variable, _layouts_of(variable, distribution, False), distribution)
        _key_anew(optimizer)


def _key_anew(optimizer: Any) -> None:
    """Keras finds a variable's slots by the identity of its tf.Variable, which is another now."""
    for one in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if one is not None and hasattr(one, "_trainable_variables_indices") and one.built:
            one._trainable_variables_indices = {one._var_key(v): i for i, v in enumerate(one._trainable_variables)}


def placed_under(model: Any) -> UnidistDistribution | None:
    """The distribution on which the model lies, or None where it lies on one device."""
    found: UnidistDistribution | None = sessions.of(model).told
    return found if found is not None and is_placed(model) else None


def prepare(model: Any, distribution: UnidistDistribution) -> None:
    """Checks the rules of a built model, builds its optimizer and places all."""
    sessions.check_rules(model, distribution)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    place_model(model, distribution)

"""Says which strategy a model trains under, and how its variables become DTensors.

A model's variables are placed when it is first used, as how they are read depends on its layers. Large ones that are
cut rest in parts from the start, and are read whole until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist.algebra import Layout
from unidist.array import as_layout
from unidist.errors import CapabilityError, LayoutError
from unidist.keras import allocator
from unidist.keras.lazy_values import Stored
from unidist.keras.patching.compat import in_stateless_scope, random_seed_dtype
from unidist.keras.patching.patches import calling
from unidist.keras.planning.auto_layouts import to_place
from unidist.keras.planning.candidates import candidate
from unidist.keras.records import model_record, variable_record
from unidist.keras.records.layer_report import applied
from unidist.keras.strategies.distribution import UnidistDistribution, adopt, current
from unidist.keras.tensorflow import values, worlds
from unidist.strategies import VariableLayouts

# Items of a variable that is in parts before its model is used.
LARGE = 1 << 16


def distribution_of(model: Any) -> UnidistDistribution | None:
    """Returns the active distribution, else the model's own: in an entrance it is where it will be."""
    found = current()
    if found is not None:
        return found
    before = _told(model)
    return None if before is None else adopt(before)


def _told(model: Any) -> UnidistDistribution | None:
    """The distribution of a model, or of the placed layers that a new one is made of."""
    own: UnidistDistribution | None = model_record.of(model).told
    if own is None and model.built:
        own = next((found for v in model.variables if (found := variable_record.of(v).distribution)), None)
    return own


def is_placed(model: Any) -> bool:
    return any(_is_spread(variable) for variable in model.variables)


def _is_spread(variable: Any) -> bool:
    return variable_record.of(variable).distribution is not None


def place_model(model: Any, distribution: UnidistDistribution) -> None:
    """Makes DTensors of what is none yet under the distribution: variables, metrics, optimizer's slots.

    Compiled steps are dropped where anything moved.

    Raises:
        LayoutError: a rule does not fit a variable, or a strict one matches none.
        CapabilityError: a layout that DTensor has not.
    """
    strangers = list(to_place(model, distribution))
    model_record.of(model).told = distribution
    if not strangers:
        return
    ruled = {id(variable) for variable in model.weights}
    gathered = _read_whole(model)
    for variable in strangers:
        found = _layouts_of(variable, distribution, id(variable) in ruled)
        if id(variable) in gathered:
            found = replace(found, compute=Layout())
        _place_variable(variable, found, distribution)
    model.train_function = model.test_function = model.predict_function = None
    applied(model, distribution)


@contextlib.contextmanager
def constants_on_mesh(model: Any, mesh: dtensor.Mesh) -> Iterator[None]:
    """Makes what a model and its layers keep as tensors whole on every device inside.

    Such are the means of Normalization, or the nodes of a graph. DTensor takes no tensor that is on no mesh, but for
    what a program has captured.
    """
    held = [(layer, name, x) for layer in model._flatten_layers() for name, x in vars(layer).items() if _is_alone(x)]
    try:
        for layer, name, x in held:
            object.__setattr__(layer, name, values.put(x.numpy(), values.replicated(mesh, x.shape.rank)))
        yield
    finally:
        for layer, name, x in held:
            object.__setattr__(layer, name, x)


def _is_alone(x: Any) -> bool:
    return isinstance(x, tf.__internal__.EagerTensor) and x.dtype != tf.resource and not values.is_spread(x)


def _read_whole(model: Any) -> set[int]:
    """Returns the variables that are gathered when they are read.

    They are all but the kernels, tables and biases of products and lookups, whose ops DTensor runs on shards. (Others
    it refuses, as a slice of a table of positions that cuts it anew.)
    """
    on_shards = {id(variable) for layer in model._flatten_layers() for variable in _used_as_shards(layer)}
    return {id(variable) for variable in model.variables} - on_shards


def _used_as_shards(layer: Any) -> list[Any]:
    found = candidate(layer)
    return found.variables if found is not None and found.kind in ("product", "table") else []


def _layouts_of(variable: Any, distribution: UnidistDistribution, ruled: bool) -> VariableLayouts:
    if variable._layout is not None and variable_record.of(variable).given is None:
        variable_record.note_given(variable, distribution.mesh, as_layout(variable._layout))
    is_weight = ruled and str(variable.dtype) != random_seed_dtype()
    return variable_record.layouts_of(variable, distribution, is_weight=is_weight, otherwise=Layout())


def _place_variable(variable: Any, found: VariableLayouts, distribution: UnidistDistribution) -> None:
    record = variable_record.of(variable)
    record.distribution, record.layouts = distribution, found
    value = variable._value
    if value is None:
        return
    storage, compute, state = (
        worlds.native_layout(layout, tuple(variable.shape), distribution.mesh)
        for layout in (found.storage, Layout(*found.compute.dims), found.state)
    )
    if not isinstance(value, values.SpreadVariable):
        value = _spread(variable, values.whole(value), storage)
    elif value.layout != storage:
        value = _in_parts(variable, values.whole(value), storage)
    value.compute, value.state, value.waits_on = compute, state, None
    variable._value = value


def _spread(variable: Any, host: Any, storage: dtensor.Layout) -> values.SpreadVariable:
    return _in_parts(variable, worlds.from_first(host) if worlds.several() else host, storage)


def _in_parts(variable: Any, host: Any, storage: dtensor.Layout) -> values.SpreadVariable:
    before = getattr(variable, "_value", None)
    # TensorFlow's tapes watch what was made trainable. A layer that is frozen for now may be trained later.
    watched = variable.trainable if before is None else before.trainable
    with dtensor.default_mesh(storage.mesh):
        made = values.SpreadVariable(values.put(host, storage), trainable=watched, name=variable.name)
    if before is not None:
        # By it Keras's optimizers know the variable: whose slots are whose, and what shall not decay.
        made._unique_id = before._unique_id
    return made


@calling
def initializing(original: Any, variable: Any, value: Any) -> None:
    """Variable._initialize: what is large and to be cut is in parts as soon as it has a value.

    What a step makes is whole on the mesh.
    """
    storage = distribution = None
    if (mesh := values.computing.get()) is not None and not in_stateless_scope():
        with _off_mesh():
            first = tf.convert_to_tensor(value() if callable(value) else value, variable.dtype).numpy()
            variable._value = _spread(variable, first, values.replicated(mesh, first.ndim))
        return
    if callable(value) and not in_stateless_scope() and tf.executing_eagerly() and prod(variable._shape) >= LARGE:
        distribution = _to_lie_on(variable)
        storage = None if distribution is None else _cut(variable, distribution)
    if storage is None:
        original(variable, value)
        return
    host = np.asarray(value())
    variable._value = _spread(variable, host, storage)
    variable._value.waits_on = distribution
    size = host.nbytes
    del host
    allocator.give_back_after(size)


def _to_lie_on(variable: Any) -> UnidistDistribution | None:
    """The distribution in force; a slot's is its variable's."""
    owner = variable_record.of_new(variable).owner
    if owner is None:
        return current()
    resting = getattr(owner, "_value", None)
    waits_on = resting.waits_on if isinstance(resting, values.SpreadVariable) else None
    found: UnidistDistribution | None = waits_on or variable_record.of(owner).distribution
    return found


def _cut(variable: Any, distribution: UnidistDistribution) -> dtensor.Layout | None:
    """Returns the layout in which a variable rests; None: it is whole, or its mistake is reported later.

    A mistake is reported when the model is placed.
    """
    try:
        found = _layouts_of(variable, distribution, True)
        storage = worlds.native_layout(found.storage, tuple(variable.shape), distribution.mesh)
    except (LayoutError, CapabilityError):
        return None
    variable_record.of(variable).layouts = found
    return storage if found.storage.dims else None


@contextlib.contextmanager
def _off_mesh() -> Iterator[None]:
    """Outside of the program that is traced, and not on DTensor's device."""
    token = values.computing.set(None)
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            yield
    finally:
        values.computing.reset(token)


def using(original: property) -> property:
    """Wraps Variable.value: what a step uses and no model has is whole everywhere.

    So it is with a metric, or Keras's own seed. Each device would write a plain variable at its own time.
    """

    def value(variable: Any) -> Any:
        _use(variable)
        return original.__get__(variable)

    return property(value, doc=original.__doc__)


def _is_plain(x: Any) -> bool:
    return isinstance(x, tf.Variable) and not isinstance(x, dtensor.DVariable)


def _use(variable: Any) -> None:
    mesh, resting = values.computing.get(), variable._value
    if mesh is None or in_stateless_scope():
        return
    # Another model's step may have put it on a mesh of its own.
    is_elsewhere = isinstance(resting, dtensor.DVariable) and resting.layout.mesh != mesh
    if _is_plain(resting) or (is_elsewhere and variable_record.of(variable).distribution is None):
        with _off_mesh():
            variable._value = _spread(variable, resting.numpy(), values.replicated(mesh, len(variable.shape)))


@calling
def writing(original: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps the writes of TensorFlow's own variables and of its generators of random numbers.

    Raises:
        CapabilityError: a step over DTensor writes one, which each device would do.
    """
    if values.computing.get() is not None and isinstance(variable, tf.random.Generator):
        raise CapabilityError(
            "a step draws from a tf.random.Generator, which over DTensor each device would do for itself. Draw by "
            "keras.random with a keras.random.SeedGenerator"
        )
    if values.computing.get() is not None and _is_plain(variable):
        raise CapabilityError(
            f"a step writes the tf.Variable {variable.name!r}, which over DTensor each device would do. Make it a "
            "variable of Keras's: self.add_weight(..., trainable=False), or keras.Variable(...)"
        )
    return original(variable, *args, **kwargs)


@calling
def loading(original: Any, variable: Any, value: Any) -> Any:
    """Variable.assign: each device's part is read from a file by itself."""
    _use(variable)
    is_alike = isinstance(value, Stored) and value.shape == tuple(variable.shape)
    if not is_alike or not isinstance(variable._value, values.SpreadVariable) or in_stateless_scope():
        return original(variable, value)
    variable._value.assign_stored(value, variable._convert_to_tensor)
    allocator.give_back_after(value.size * value.dtype.itemsize)
    return value


def place_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Builds and places an optimizer that is none of the model's own.

    A train_step may have several; Keras knows one. While a step is traced this is done outside of its program.
    """
    distribution = next((found for v in variables if (found := variable_record.of(v).distribution) is not None), None)
    if distribution is None or (optimizer.built and all(map(_is_spread, optimizer.variables))):
        return
    with _off_mesh():
        if not optimizer.built:
            optimizer.build(variables)
        variable_record.note_slots(optimizer)
        for variable in optimizer.variables:
            if not _is_spread(variable):
                _place_variable(variable, _layouts_of(variable, distribution, False), distribution)


def placed_under(model: Any) -> UnidistDistribution | None:
    """The distribution on which the model is, or None where it is on one device."""
    found = _told(model)
    return found if found is not None and is_placed(model) else None


def prepare(model: Any, distribution: UnidistDistribution) -> None:
    """Checks the rules of a built model, builds its optimizer and places all."""
    model_record.adjust(model, distribution)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    place_model(model, distribution)

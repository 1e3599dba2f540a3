"""Variables: under which distribution each was made, and how a model is placed on another."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from keras import distribution as keras_distribution

from unidist.keras import allocator
from unidist.keras.active_distribution import active
from unidist.keras.jax import layouts, processes
from unidist.keras.lazy_values import SMALL, Stored
from unidist.keras.patching.compat import in_stateless_scope
from unidist.keras.patching.patches import calling
from unidist.keras.planning.auto_layouts import to_place
from unidist.keras.records import model_record, variable_record
from unidist.keras.records.layer_report import applied
from unidist.keras.strategies.distribution import adopt


def current() -> Any:
    """Keras's distribution of this thread, or None."""
    return keras_distribution.distribution()


def initialize_layout(variable: Any) -> None:
    """JaxVariable._initialize_layout: finds the layout, and remembers it and the distribution."""
    record = variable_record.of_new(variable)
    # A slot is laid out as its variable, and is placed with it.
    distribution = current() if record.owner is None else variable_record.of(record.owner).distribution
    if distribution is None or record.lies_on(distribution):  # Keras asks twice.
        return
    if variable._layout is not None and record.distribution is None:
        given = layouts.of_native(layouts.native(variable._layout, distribution))
        variable_record.note_given(variable, adopt(distribution).mesh, given)
    _lay(variable, distribution)


@calling
def reading(original: Any, variable: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """JaxVariable.__array__: the whole value, also of a variable that spans processes."""
    value = variable.value
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return np.array(processes.whole(value), dtype, copy=copy)
    return original(variable, dtype)


@calling
def assigning(original: Any, variable: Any, value: Any) -> None:
    """JaxVariable._direct_assign: onto a mesh of several processes from the same value on each."""
    distribution = variable_record.of(variable).distribution
    if distribution is None or variable._layout is None or isinstance(value, jax.core.Tracer):
        original(variable, value)
        return
    sharding = layouts.native(variable._layout, distribution)
    if sharding.is_fully_addressable or getattr(value, "sharding", None) == sharding:
        original(variable, value)
        return
    variable._value = processes.put(value, sharding)


@calling
def loading(original: Any, variable: Any, value: Any) -> Any:
    """JaxVariable.assign: each device's shard is read from a file by itself."""
    distribution = variable_record.of(variable).distribution
    is_alike = isinstance(value, Stored) and value.shape == tuple(variable.shape)
    if not is_alike or distribution is None or variable._layout is None or in_stateless_scope():
        return original(variable, value)
    dtype = variable._dtype

    def part(index: Any) -> Any:
        found = value.part(index)
        return found if str(found.dtype) == dtype else np.asarray(variable._convert_to_tensor(found, dtype=dtype))

    sharding = layouts.native(variable._layout, distribution)
    variable._value = jax.make_array_from_callback(value.shape, sharding, part).block_until_ready()
    allocator.give_back_after(variable._value.nbytes)
    return variable._value


@calling
def initializing(original: Any, variable: Any, initializer: Any) -> None:
    """Wraps JaxVariable._initialize_with_initializer: waits for the value.

    JAX runs ahead, and would hold what many random functions compute with at once.
    """
    original(variable, initializer)
    value = variable._value
    is_value = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    if is_value and value.size >= SMALL and variable_record.of(variable).distribution is not None:
        allocator.give_back_after(value.block_until_ready().nbytes)


def distribution_of(model: Any) -> Any:
    """The active distribution, else the model's own."""
    outer = current()
    return outer if outer is not None else model_record.distribution_of(model)


def place_model(model: Any, distribution: Any) -> None:
    """Places what is not on the distribution yet: variables, metrics, the optimizer's slots.

    Compiled steps are dropped where anything moved: they were made for the old places.

    Raises:
        LayoutError: a rule does not fit a variable.
    """
    strangers = to_place(model, distribution)
    if not strangers:
        applied(model, distribution)
        return
    with active(distribution):
        for variable in strangers:
            _place_variable(variable, distribution)
    model_record.of(model).told = distribution
    model.train_function = model.test_function = model.predict_function = None
    applied(model, distribution)


@calling
def overwriting(original: Any, self: Any, trainable_variables: Any) -> None:
    """Wraps Optimizer._overwrite_model_variables_with_average_value: variables get copies of the averages.

    Keras gives them the arrays themselves, which the next step would donate away from under the averages.
    """
    original(self, trainable_variables)
    for variable in trainable_variables:
        value = variable._value
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            variable._value = jax.numpy.copy(value)


def _place_variable(variable: Any, distribution: Any) -> None:
    value, before = variable._value, variable_record.of(variable).distribution
    _lay(variable, distribution)
    if value is None:
        return
    sharding = layouts.native(variable._layout, distribution)
    if value.sharding == sharding:
        return
    if processes.several():
        value = processes.whole(value)
        if before is None:
            # Made on its own in each process: the seeds may have differed.
            value = processes.array_from_first(value, "first values")
    variable._value = processes.put(value, sharding)


def _lay(variable: Any, distribution: Any) -> None:
    record = variable_record.of(variable)
    record.layouts = layouts.layouts_of(variable, distribution)
    record.distribution = distribution
    variable._layout = layouts.of_keras(record.layouts.storage, tuple(variable.shape), distribution)


def waits_for_plan(model: Any, distribution: Any) -> bool:
    """Returns whether the layouts of a model are still to be found: it was built after its fit began."""
    found = getattr(distribution, "found", None)
    return found is not None and not found.knows((v.path, tuple(v.shape)) for v in model.variables)

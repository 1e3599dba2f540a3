"""Variables: which distribution each was created under, and how a model that exists is placed on another."""

from __future__ import annotations

import functools
import threading
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
import numpy as np
from keras import distribution as keras_distribution

from unidist.keras.making import active, made_under
from unidist.keras.partitioned import layouts, processes
from unidist.keras.planning.settling import PLACED, REFERENCE, to_place
from unidist.keras.strategy import UnidistDistribution, adopt
from unidist.keras.telling import applied

_checked: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_making = threading.local()


def current() -> Any:
    """Keras's distribution of this thread, or None."""
    return keras_distribution.distribution()


def initializing_layout(original: Any) -> Any:
    """JaxVariable._initialize_layout: checks the layout and remembers the distribution."""

    @functools.wraps(original)
    def _initialize_layout(variable: Any) -> None:
        if getattr(_making, "metric", False):
            setattr(variable, layouts.OF_METRIC, True)
        distribution = current()
        if distribution is None:
            original(variable)
            return
        given = variable._layout
        if given is None:
            variable._layout = layouts.of_variable(variable, distribution)
        if not hasattr(variable, layouts.GIVEN):
            # Keras asks twice: the second time the layout is the one that was found the first time.
            setattr(variable, layouts.GIVEN, given)
        setattr(variable, PLACED, distribution)

    return _initialize_layout


def reading(original: Any) -> Any:
    """JaxVariable.__array__: the whole value, also of a variable that spans processes."""

    @functools.wraps(original)
    def __array__(variable: Any, dtype: Any = None, copy: bool | None = None) -> Any:  # noqa: N807 (Keras's name)
        value = variable.value
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            return np.array(processes.whole(value), dtype, copy=copy)
        return original(variable, dtype)

    return __array__


def assigning(original: Any) -> Any:
    """JaxVariable._direct_assign: onto a mesh of several processes from the same value on each."""

    @functools.wraps(original)
    def _direct_assign(variable: Any, value: Any) -> None:
        distribution = getattr(variable, PLACED, None)
        if distribution is None or variable._layout is None or isinstance(value, jax.core.Tracer):
            original(variable, value)
            return
        sharding = layouts.native(variable._layout, distribution)
        if sharding.is_fully_addressable or getattr(value, "sharding", None) == sharding:
            original(variable, value)
            return
        variable._value = processes.put(value, sharding)

    return _direct_assign


def adding_slot(original: Any) -> Any:
    """Optimizer.add_variable_from_reference: remembers whose slot it is."""

    @functools.wraps(original)
    def add_variable_from_reference(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        distribution = current()
        if distribution is None or getattr(reference_variable, "_layout", None) is None:
            slot = original(self, reference_variable, *args, **kwargs)
        else:
            state = layouts.placement(reference_variable, distribution).state
            slot = original(self, _Laid(reference_variable, state), *args, **kwargs)
        setattr(slot, REFERENCE, ref(reference_variable))
        return slot

    return add_variable_from_reference


class _Laid:
    """A variable that seems to lie elsewhere: Keras gives a slot the layout of the variable that it belongs to."""

    def __init__(self, variable: Any, layout: Any) -> None:
        self._variable = variable
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._variable, name)


def adding_to_metric(original: Any) -> Any:
    """Metric.add_variable: lets the variable be known as a metric's before it is given its place."""

    @functools.wraps(original)
    def add_variable(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _making.metric = getattr(_making, "metric", False), True
        try:
            return original(self, *args, **kwargs)
        finally:
            _making.metric = before

    return add_variable


def distribution_of(model: Any) -> Any:
    """The distribution that a model's variables lie on, else that under which it was made, else None."""
    for variable in model.variables:
        found = getattr(variable, PLACED, None)
        if found is not None:
            return found
    return made_under.get(model)


def place_model(model: Any, distribution: Any) -> None:
    """Places what does not lie on the distribution yet: variables, metrics, the optimizer's slots.

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
    made_under[model] = distribution
    model.train_function = model.test_function = model.predict_function = None
    applied(model, distribution)


def overwriting(original: Any) -> Any:
    """Optimizer._overwrite_model_variables_with_average_value: variables get copies of the averages, where Keras gives
    them the arrays themselves, which the next step would donate away from under the averages."""

    @functools.wraps(original)
    def overwrite(self: Any, trainable_variables: Any) -> None:
        original(self, trainable_variables)
        for variable in trainable_variables:
            value = variable._value
            if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
                variable._value = jax.numpy.copy(value)

    return overwrite


def _place_variable(variable: Any, distribution: Any) -> None:
    value, before = variable._value, getattr(variable, PLACED, None)
    variable._layout = _kept_layout(variable, distribution)
    if variable._layout is None:
        variable._layout = layouts.of_variable(variable, distribution)
    setattr(variable, PLACED, distribution)
    if value is None:
        return
    sharding = layouts.native(variable._layout, distribution)
    if value.sharding == sharding:
        return
    if before is None:
        # Made on its own in each process: the seeds may have differed.
        value = processes.array_from_first(processes.whole(value), "first values") if processes.several() else value
    variable._value = processes.put(processes.whole(value) if processes.several() else value, sharding)


def _kept_layout(variable: Any, distribution: Any) -> Any:
    """A slot lies where the gradient of its variable is reduced to; a layout given by hand is kept on its mesh."""
    reference = getattr(variable, REFERENCE, lambda: None)()
    if reference is not None and tuple(reference.shape) == tuple(variable.shape):
        return None if reference._layout is None else layouts.placement(reference, distribution).state
    given = getattr(variable, layouts.GIVEN, None)
    if given is None:
        return None
    on_mesh = layouts.native(given, distribution).mesh == distribution.device_mesh.backend_mesh
    return given if on_mesh else None


def waits_for_plan(model: Any, distribution: Any) -> bool:
    """Whether the layouts of a model are still to be found: it was built after its fit began."""
    found = getattr(distribution, "found", None)
    return found is not None and not found.knows((v.path, tuple(v.shape)) for v in model.variables)


def check_rules(model: Any, distribution: Any) -> None:
    """Raises LayoutError, once for a built model, where strict rules match none of its variables.

    Keras's own strategies also take rules for the outputs of layers.
    """
    if _checked.get(model) is distribution:
        return
    paths = [variable.path for variable in model.variables]
    if not isinstance(distribution, UnidistDistribution):
        paths += [f"{layer.path}/output" for layer in model._flatten_layers()]
    adopt(distribution).check_model(paths)
    _checked[model] = distribution

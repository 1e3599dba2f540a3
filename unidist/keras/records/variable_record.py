"""Keeps what is known of a Keras variable: one record on each, whatever the driver.

How a variable comes to its layouts, by `layouts_of`:

- *Made inside a scope.* Torch and JAX place it when it gets its value, TensorFlow when its model is first used. A
  weight is laid out as the strategy says; what is no weight, by the rule alone, or as the driver says.
- *Of a model that was built before.* The same, when the model is first placed. A layout given by hand is kept.
- *A slot of an optimizer.* It is placed with its variable, and rests where that one's gradient is reduced to. A hook
  notes whose slot it is; of an optimizer that was built before the hooks were on, its own tables tell.
- *The state of a metric.* On torch each rank sums up its own rows, so it is partial over the data axes. JAX and
  DTensor compute metrics of whole batches, and it is like anything else that is no weight.

The record is an attribute: Keras's variables compare by value and cannot be keys. It stays where torch's driver gives a
variable another class, and no copy takes it along.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from unidist.algebra import Layout, Mesh, Sharding
from unidist.keras.patching.compat import BaseOptimizer, backend
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.strategies.distribution import UnidistDistribution, adopt
from unidist.strategies import VariableLayouts


class Placed:
    """Holds what is known of one variable.

    Attributes:
        distribution: the one that it is on; None: it is as Keras made it.
        layouts: how it is laid out there; None: it is to be placed, or placed anew.
        given: the layout that it was given by hand.
        is_settled: a trainer works with it where it is, so that no later plan moves it.
    """

    def __init__(self) -> None:
        self.distribution: Any = None
        self.layouts: VariableLayouts | None = None
        self.given: Sharding | None = None
        self.is_settled = False
        self._owner: weakref.ref[Any] | None = None

    @property
    def owner(self) -> Any:
        """The variable whose slot this one is, or None."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, variable: Any) -> None:
        self._owner = weakref.ref(variable)

    def lies_on(self, distribution: Any) -> bool:
        return self.distribution is distribution and self.layouts is not None

    def __reduce__(self) -> tuple[type[Placed], tuple[()]]:
        """Copies as a new record: nothing is known of a copy."""
        return Placed, ()


def of(variable: Any) -> Placed:
    """The record of a variable."""
    found: Placed | None = getattr(variable, "_unidist", None)
    if found is None:
        found = variable._unidist = Placed()
    return found


def of_new(variable: Any) -> Placed:
    """The record of a variable that is being made, which knows whose slot it is."""
    found = of(variable)
    if _making.owner is not None and _same_shape(variable, _making.owner):
        found.owner = _making.owner
    return found


def note_given(variable: Any, mesh: Mesh, layout: Layout) -> None:
    """Notes the layout that a variable has before it is placed; a slot has its owner's from Keras."""
    if owner_of(variable) is None:
        of(variable).given = Sharding(mesh, layout, tuple(variable.shape))


def is_state_of_metric(variable: Any) -> bool:
    """As Keras declares them: summed where they are read."""
    return bool(variable.synchronization == "on_read")


def alike(layout: Layout) -> VariableLayouts:
    """One layout for all purposes."""
    return VariableLayouts(storage=layout, compute=layout, state=layout)


def layouts_of(
    variable: Any, distribution: Any, *, is_weight: bool, otherwise: Layout | None = None
) -> VariableLayouts:
    """Returns how a variable is to be laid out on a distribution.

    Args:
        is_weight: it has a gradient, or may have one. Torch counts what is trained, or was before it was frozen: only
            that goes through its reducers. On JAX and DTensor, whose steps hold moving statistics as they hold weights,
            it is all but seeds, states of metrics and, on DTensor, what is no variable of the model.
        otherwise: how it is laid out if it is no weight; None: by the rule. On DTensor, which partitions by what it is
            given, whole. On torch the state of a metric is a sum over the data axes.

    Raises:
        LayoutError: two rules match its path, or a dim does not divide.
    """
    record, shape = of(variable), tuple(variable.shape)
    owner = owner_of(variable)
    known = None if owner is None else of(owner).layouts
    if known is not None and _same_shape(variable, owner):
        return alike(known.state)
    ours: UnidistDistribution = adopt(distribution)
    if record.given is not None and record.given.mesh == ours.mesh:
        return alike(record.given.layout)
    if not is_weight and otherwise is not None:
        return alike(otherwise)
    if ours is not distribution and ours.layout_map is not None:
        ours.layout_map.match(variable.path)
    if not is_weight:
        return alike(ours.strategy.rule(variable.path, shape))
    return ours.strategy.variable(variable.path, shape)


def owner_of(variable: Any) -> Any:
    """The variable whose slot this one is, or None."""
    return of(variable).owner


def _same_shape(one: Any, other: Any) -> bool:
    return tuple(one.shape) == tuple(other.shape)


# whose slots they are -------------------------------------------------------------------------------------------------


class _Making(threading.local):
    owner: Any = None


_making = _Making()


def hooks() -> tuple[Hook, ...]:
    return (Hook(BaseOptimizer, "add_variable_from_reference", _adding_slot, "slots know their variables"),)


@calling
def _adding_slot(original: Any, self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps Optimizer.add_variable_from_reference: notes whose slot it is, before it is placed.

    It is placed when it gets its value.
    """
    before, _making.owner = _making.owner, reference_variable
    try:
        slot = original(self, reference_variable, *args, **kwargs)
    finally:
        _making.owner = before
    of(slot).owner = reference_variable
    return slot


def note_slots(optimizer: Any) -> None:
    """Notes whose slots an optimizer has that was built before the hooks were on.

    Their names do not tell: those of `a_b/c` and of `a/b_c` begin alike. Keras's optimizers find them in tables with
    one entry for each variable that they train, in order.
    """
    if not getattr(optimizer, "built", False):
        return
    for inner in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", ())):
        note_slots(inner)
    trained, own = optimizer._trainable_variables, optimizer._variables
    held = {id(variable) for variable in own}
    containers = (value for value in vars(optimizer).values() if value is not own)
    for table in _tables(containers, len(trained)):
        for slot, variable in zip(table, trained, strict=True):
            if id(slot) in held and owner_of(slot) is None and _same_shape(slot, variable):
                of(slot).owner = variable


def _tables(values: Iterable[Any], length: int) -> Iterator[list[Any]]:
    """The lists of so many variables among some values, or in them."""
    for value in values:
        if isinstance(value, dict):
            value = list(value.values())
        if not isinstance(value, list | tuple):
            continue
        if len(value) == length and all(one is None or isinstance(one, backend.Variable) for one in value):
            yield list(value)
        else:
            yield from _tables(value, length)

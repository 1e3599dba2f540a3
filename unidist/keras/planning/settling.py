"""Settling: a strategy that finds its layouts by itself makes the plan of a model, once the model is whole; and which
variables are to be placed then."""

from __future__ import annotations

from typing import Any

from unidist.keras.making import all_variables
from unidist.keras.planning.planning import plan

# Keras's variables compare by value and so cannot be keys: what is known of one is told by attributes on it. Here the
# distribution that it lies on, and of an optimizer's slot the variable that it belongs to.
PLACED = "_unidist_distribution"
REFERENCE = "_unidist_reference"
# In place of the distribution, where a plan moves a variable: its value is the same on every process already.
_MOVING = object()


def waits(model: Any, distribution: Any) -> bool:
    """Whether a built model's distribution finds layouts by itself, and has not found those of this model."""
    found = getattr(distribution, "found", None)
    if found is None or not model.built or not model.variables:
        return False
    return not found.knows((v.path, tuple(v.shape)) for v in model.variables)


def settle(model: Any, distribution: Any) -> bool:
    """Makes the plan of a built model where its distribution waits for one. Whether it made one.

    No collective: every process finds the same, from shapes and configurations alone.

    Raises:
        LayoutError: the model cannot be run on a small random batch.
    """
    if not waits(model, distribution):
        return False
    strategy = distribution.strategy
    made = plan(model, strategy.mesh, data_axis=strategy.data_axes, model_axis=distribution.model_axes)
    distribution.found.add(made.rows)
    return True


def to_place(model: Any, distribution: Any) -> list[Any]:
    """Settles, and gives the variables that do not lie where the distribution wants them, slots after all others.

    Raises:
        LayoutError: the model cannot be run on a small random batch.
    """
    if settle(model, distribution):
        for variable in all_variables(model):
            if getattr(variable, PLACED, None) is distribution:
                setattr(variable, PLACED, _MOVING)
    strangers = [v for v in all_variables(model) if getattr(v, PLACED, None) is not distribution]
    return sorted(strangers, key=lambda v: hasattr(v, REFERENCE))

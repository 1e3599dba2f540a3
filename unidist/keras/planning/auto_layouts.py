"""Settling: a strategy that finds its layouts by itself plans a model, once the model is whole.

Then it knows which variables are to be placed.
"""

from __future__ import annotations

from typing import Any

from unidist.keras.active_distribution import all_variables
from unidist.keras.planning.plan import layouts_of
from unidist.keras.planning.samples import parts
from unidist.keras.records import variable_record
from unidist.keras.records.layer_report import warn


def waits(model: Any, distribution: Any) -> bool:
    """Returns whether a built model's distribution finds layouts by itself, and not yet this model's."""
    found = getattr(distribution, "found", None)
    if found is None or not model.built or not model.variables:
        return False
    return not found.knows((v.path, tuple(v.shape)) for v in model.variables)


def settle(model: Any, distribution: Any) -> bool:
    """Plans a built model, or its parts, where its distribution waits for that; returns whether it did.

    No collective: every process finds the same, from shapes and configurations alone.

    Raises:
        LayoutError: the model cannot be run on random batches.
    """
    if not waits(model, distribution):
        return False
    strategy, found = distribution.strategy, distribution.found
    # Of a model without any such part the plan says what is missing.
    plans = [layouts_of(part, strategy, distribution.model_axes) for part in parts(model) or [model]]
    for made in plans:
        found.add(made)
    found.keep_whole((v.path, tuple(v.shape)) for v in model.variables)
    if idle := all(made.idle for made in plans) and plans[0].idle:
        warn(f"model {model.name!r} under {type(distribution).__name__}: {idle}")
    return True


def to_place(model: Any, distribution: Any) -> list[Any]:
    """Settles, and returns the variables that are not where the distribution wants them, slots last.

    Raises:
        LayoutError: the model cannot be run on random batches.
    """
    if settle(model, distribution):
        for variable in all_variables(model):
            variable_record.of(variable).layouts = None
    strangers = [v for v in all_variables(model) if not variable_record.of(v).lies_on(distribution)]
    if strangers:
        variable_record.note_slots(getattr(model, "optimizer", None))
    return sorted(strangers, key=lambda v: variable_record.owner_of(v) is not None)

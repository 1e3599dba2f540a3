"""Holding: what a device keeps of a step's activations until backward has used them."""

from __future__ import annotations

from unidist.algebra import Layout
from unidist.planner.facts import Facts
from unidist.planner.predicting import Workload, roles


def activation_bytes(facts: Facts, layouts: list[Layout], step: Workload) -> int:
    """Bytes of activations on the device that has most rows.

    Counted is each tensor that an innermost layer takes or gives, once, and what an activation function inside of a
    layer takes, if its derivative needs that. What is between the layers of a pair is cut over the pair's axes, all
    else over the data axes alone.
    """
    found = roles(facts, layouts)
    total = 0.0
    for activation in facts.activations:
        role = None if activation.behind is None else found[activation.behind]
        is_cut = role is not None and role.paired and role.name == "column"
        parts = step.mesh.axis_size(role.axes) if role is not None and is_cut else 1
        total += activation.bytes_at(step.sequence) * step.rows / parts
    return round(total)

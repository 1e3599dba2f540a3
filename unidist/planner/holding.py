"""Holding: what a device keeps of a step's activations until backward has used them."""

from __future__ import annotations

from unidist.algebra import Layout
from unidist.planner.facts import Facts
from unidist.planner.predicting import Workload, roles


def activation_bytes(facts: Facts, layouts: list[Layout], step: Workload) -> int:
    """Bytes of activations on the device that has most rows.

    With Keras on torch that is what autograd keeps of the model's call. Elsewhere each tensor counts that an innermost
    layer takes or gives, once, and what an activation function inside of a layer takes, if its derivative needs that.
    What is between the layers of a pair is cut over the pair's axes, all else over the data axes alone. Of a weight
    that is cut, and that a layer without a rule gathers, the whole is kept too.
    """
    found = roles(facts, layouts)
    total = 0.0
    for activation in facts.activations:
        of_layers = [found[k] for k in activation.behind]
        cut = next((role.axes for role in of_layers if role.paired and role.name == "column"), None)
        parts = 1 if cut is None else step.mesh.axis_size(cut)
        total += activation.bytes_at(step.sequence, step.rows) / parts
    ruled = {k for layer in facts.layers for k in (layer.kernel, layer.bias, layer.reverse)}
    gathered = [k for k in set(facts.kept) - ruled if layouts[k].dims]
    return round(total) + sum(facts.variables[k].bytes for k in gathered)

"""Says what a device keeps of activations until backward has used them."""

from __future__ import annotations

from dataclasses import dataclass

from unidist.algebra import Layout
from unidist.ledger import Ledger
from unidist.planner.facts import Activation, Facts, held_at_once
from unidist.planner.predicting import Workload, roles, stack_axes


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Says what was seen of a step on tensors without values.

    Attributes:
        sent: what layers send, forward and backward.
        kept: bytes that forward keeps for backward, of activations; None: it was not looked at.
    """

    sent: Ledger
    kept: int | None = None


def activation_bytes(facts: Facts, layouts: list[Layout], step: Workload) -> int:
    """Bytes of activations on the device that has most rows.

    With Keras on torch that is what autograd keeps of the model's call. Elsewhere each tensor counts that an innermost
    layer takes or gives, once, and what an activation function inside of a layer takes, if its derivative needs that.
    What is between the layers of a pair is cut over the pair's axes. What a stack of kernels computes, or has as many
    entries as that along its first dim, is cut over the stack's axes, and all else over the data axes alone. Of a
    weight that is cut, and that a layer without a rule gathers, the whole is kept too. What has places of a sequence is
    cut over the context axes. Of what backward computes again, it is held of one layer at a time.
    """
    found = roles(facts, layouts)
    over = [(stack, stack_axes(stack, layouts)) for stack in facts.stacks]
    stacks = {stack.size: axes for stack, axes in over if axes and not set(axes) & set(step.data_axes)}
    sizes: list[tuple[int, float]] = []
    for activation in facts.activations:
        of_layers = [found[k] for k in activation.behind]
        cut = next((role.axes for role in of_layers if role.paired and role.name == "column"), None)
        cut = stacks.get(activation.stack or _leading(activation)) if cut is None else cut
        parts = 1 if cut is None else step.mesh.axis_size(cut)
        if step.lengths.intersection(activation.lengths_at(step.sequence)[1:]):
            parts *= step.contexts
        sizes.append((activation.again, activation.bytes_at(step.sequence, step.rows) / parts))
    ruled = {k for layer in facts.layers for k in (layer.kernel, layer.bias, layer.reverse)}
    ruled.update(k for stack, axes in over if axes in stacks.values() for k in stack.members)
    gathered = [k for k in set(facts.kept) - ruled if layouts[k].dims]
    return round(held_at_once(sizes)) + sum(facts.variables[k].bytes for k in gathered)


def _leading(activation: Activation) -> int:
    """Returns the length of the first dim, where it is the same for all batches; else 0."""
    first = activation.dims[0] if activation.dims else None
    return 0 if first is None or first.slope else round(first.constant)

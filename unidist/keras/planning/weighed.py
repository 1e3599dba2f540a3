"""Finds with how many kernels of a stack a model goes on for each row, as gates choose. On torch.

Weights of the others are zero, and so are the gradients of what those kernels make.
"""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import Any

from unidist.keras.layer_facts import stack_of
from unidist.keras.planning import samples
from unidist.keras.planning.kept_tensors import Runs
from unidist.keras.planning.trial_runs import Runner


def chosen(runner: Runner, model: Any, inputs: Any, runs: Runs) -> dict[int, float]:
    """Returns by the ids of layers how many of their kernels count for a row, on random numbers.

    None of what gives no output for each kernel and row.
    """
    import torch

    given: list[tuple[int, Any]] = []

    def note(layer: Any, x: Any, out: Any) -> Any:
        wanted = stack_of(layer)[0].shape[0], *x.shape[:1]
        if not isinstance(out, torch.Tensor) or tuple(out.shape[:2]) != wanted or not out.is_floating_point():
            return out
        given.append((id(layer), out.detach().requires_grad_()))
        return given[-1][1]

    kwargs = {"training": False} if model._call_has_training_arg else {}
    runner.of_stacks = note
    try:
        # Whatever a model may raise that asks tensors for values: some do not give those that have gradients.
        with contextlib.suppress(Exception), torch.enable_grad():
            run = runner.run(model, (samples.sample(model, inputs, runs.rows, runs.lengths[0]),), kwargs)
            ends = [x for x in (*run.outputs, *chain(*run.taken.values())) if getattr(x, "requires_grad", False)]
            # Other numbers for each place: the plain sum of what is normalized has no gradient.
            total = sum((x * torch.arange(1.0, x.numel() + 1).sin().reshape(x.shape).to(x)).sum() for x in ends)
            found = torch.autograd.grad(total, [x for _, x in given], allow_unused=True) if ends else []
            return {
                layer: (x != 0).flatten(2).any(2).sum().item() / x.shape[1]
                for (layer, _), x in zip(given, found, strict=True)
                if x is not None
            }
    finally:
        runner.of_stacks = None
    return {}

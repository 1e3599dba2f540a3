"""PyTorch's own operator database: its operations, and sample inputs for them."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.torch.sharded.lockstep import Case, tensors

# Whose results no two calls have in common, or which are views of memory by design.
_RANDOM = """
    bernoulli cauchy exponential geometric log_normal multinomial normal rand_like randint randint_like randn randn_like
    uniform nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.alpha_dropout
    nn.functional.feature_alpha_dropout.with_train nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d nn.functional.rrelu pca_lowrank svd_lowrank
"""
_EMPTY = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided"
_STRIDES = "as_strided as_strided_copy as_strided_scatter"
_MEMORY = "resize_ resize_as_"
LEFT_OUT = {
    **dict.fromkeys(_RANDOM.split(), "draws random numbers"),
    **dict.fromkeys(_EMPTY.split(), "is not initialized"),
    **dict.fromkeys(_STRIDES.split(), "reads memory by strides, which a part has its own of"),
    **dict.fromkeys(_MEMORY.split(), "gives a tensor other memory in place, which is refused by name"),
}
# Of other operations the samples that draw, with the numbers of a seed of their own: ranks come to them apart.
SAMPLES_LEFT_OUT: dict[str, Callable[[Any], bool]] = {
    "nn.functional.multi_head_attention_forward": lambda sample: sample.args[9] > 0,
    "nn.functional.scaled_dot_product_attention": lambda sample: sample.kwargs["dropout_p"] > 0,
}


def names() -> list[str]:
    """Those with samples of float64."""
    every = [op for op in op_db if torch.float64 in op.dtypes]
    return [name(op) for op in every if LEFT_OUT.keys().isdisjoint((op.name, name(op)))]


def name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def cases(wanted: set[str], samples: int, skipped: Counter[str]) -> Iterator[Case]:
    """Up to so many samples of each operation, spread over those that the database has."""
    for op in op_db:
        if name(op) not in wanted:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = list(itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), 40))
            held = [sample for sample in held if tensors((sample.input, sample.args, sample.kwargs))]
            if (draws := SAMPLES_LEFT_OUT.get(name(op))) is not None:
                skipped["draws random numbers"] += sum(map(draws, held))
                held = list(itertools.filterfalse(draws, held))
            for sample in held[:: max(1, len(held) // samples)][:samples]:
                case = _case(op, sample, skipped)
                if case is not None:
                    yield case


def _case(op: Any, sample: Any, skipped: Counter[str]) -> Case | None:
    flat, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    inputs = [flat[k].detach().clone() for k in places]
    if any(x.layout != torch.strided or x.is_quantized for x in inputs):
        skipped["inputs that are not strided"] += 1
        return None

    def function(*given: torch.Tensor) -> Any:
        values = list(flat)
        for k, x in zip(places, given, strict=True):
            values[k] = x
        first, args, kwargs = tree_unflatten(values, tree)
        return op.op(first, *args, **kwargs)

    case = _plain(name(op), function, inputs)
    if case is None:
        skipped["the plain call fails"] += 1
        return None
    found = [y for y in (*case.want[0], *case.want[1]) if y is not None]
    if any(y.layout != torch.strided for y in found):
        skipped["results or gradients that are not strided"] += 1
        return None
    return case


def _plain(of: str, function: Callable[..., Any], inputs: list[torch.Tensor]) -> Case | None:
    """With the gradients that torch has: of all inputs, or of each that has one alone."""
    every = frozenset(range(len(inputs)))

    def tried(constant: frozenset[int]) -> Case | None:
        try:
            return Case(of, function, inputs, constant)
        except Exception:
            return None

    if (case := tried(frozenset())) is not None or tried(every) is None:
        return case
    return tried(frozenset(k for k in every if tried(every - {k}) is None)) or tried(every)

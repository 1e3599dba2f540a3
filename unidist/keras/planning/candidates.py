"""Candidates: the layers whose kernels can be cut, recognised by their class and equation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras

from unidist.keras.layer_facts import overwritten
from unidist.keras.layers import children, computes_as, has_more_than_its_kernel, keeps_to_its_kernel
from unidist.keras.patching.compat import BaseConv
from unidist.planner.facts import low_rank_dims

RECURRENT_CELLS = (keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.ConvLSTM1D)
_TABLES = (keras.layers.Embedding, keras.layers.ReversibleEmbedding)


@dataclass(eq=False)
class Candidate:
    """A layer whose kernel can be cut.

    Attributes:
        kind: "product", "table" or "convolution".
        outputs: kernel dim -> dim of the layer's output that a cut of it cuts (counted from the end where negative).
        inputs: kernel dim -> dim of the layer's input.
        biases: kernel dim -> the bias's dim along it, or None.
        beside: what is cut as the kernel is: each variable with kernel dim -> its own dim along that one. Such are
            two kernels whose product is added to the kernel (LoRA), and the scales and histories of a quantized one.
    """

    layer: Any
    kind: str
    kernel: Any
    bias: Any = None
    reverse: Any = None
    outputs: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    biases: dict[int, int | None] = field(default_factory=dict)
    beside: tuple[tuple[Any, dict[int, int]], ...] = ()

    @property
    def variables(self) -> list[Any]:
        return [v for v in (self.kernel, self.bias, self.reverse, *(v for v, _ in self.beside)) if v is not None]


def candidate(layer: Any) -> Candidate | None:
    """Returns the candidate that a layer is, or None.

    None for one of another class, with a packed kernel, a table with more than one, or one that was never called and
    has no kernel.
    """
    if not layer.built or not keeps_to_its_kernel(layer):
        return None
    found = _find(layer)
    if found is None or found.kernel is None:
        return None
    if has_more_than_its_kernel(layer):
        if found.kind != "product":
            return None
        found.beside = tuple(_beside(layer, found))
    return found


def _beside(layer: Any, found: Candidate) -> Iterator[tuple[Any, dict[int, int]]]:
    if getattr(layer, "lora_enabled", False):
        added = layer.lora_kernel_a, layer.lora_kernel_b
        yield from zip(added, low_rank_dims(len(found.kernel.shape)), strict=True)
    if layer.quantization_mode == "int8":
        # It meets the outputs as a bias does, aligned from the end.
        scale, shape = layer.kernel_scale, found.kernel.shape
        aligned = {dim: len(scale.shape) + out for dim, out in found.outputs.items() if out < 0}
        yield scale, {dim: own for dim, own in aligned.items() if own >= 0 and scale.shape[own] == shape[dim]}
    yield from ((variable, {}) for variable in overwritten(layer))


def _find(layer: Any) -> Candidate | None:
    kind = computes_as(layer)
    if kind is keras.layers.Dense:
        return Candidate(layer, "product", layer._kernel, layer.bias, None, {1: -1}, {0: -1}, {1: 0})
    if kind is keras.layers.EinsumDense:
        return _einsum(layer)
    if kind in _TABLES:
        reverse = getattr(layer, "reverse_embeddings", None)
        return Candidate(layer, "table", getattr(layer, "_embeddings", None), None, reverse)
    if kind is BaseConv:
        last = layer._kernel.ndim - 1
        return Candidate(layer, "convolution", layer._kernel, layer.bias, None, {last: -1}, {}, {last: 0})
    return None


def _einsum(layer: Any) -> Candidate | None:
    inputs, output = layer.equation.replace(" ", "").split("->")
    data, kernel = inputs.split(",")
    if "..." in kernel or any(len(set(t)) != len(t) for t in (data.replace(".", ""), kernel)):
        return None
    found = Candidate(layer, "product", layer._kernel, layer.bias)
    bias = [letter for letter in output if letter in (layer.bias_axes or "")]
    for dim, letter in enumerate(kernel):
        if letter in output and letter not in data:
            found.outputs[dim] = _from_end(output, letter)
            found.biases[dim] = _bias_dim(layer.bias, bias, letter)
        elif letter in data and letter not in output:
            found.inputs[dim] = _from_end(data, letter)
    return found


def _bias_dim(bias: Any, letters: list[str], letter: str) -> int | None:
    """Returns the bias's dim along a letter.

    Keras aligns biases with the output from the end: behind its first letter every letter has a dim, of size 1 where it
    is not named.
    """
    if bias is None or letter not in letters:
        return None
    return letters.index(letter) + bias.ndim - len(letters) if len(letters) == bias.ndim else None


def einsum_shape(equation: str, data: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an einsum's output. (EinsumDense gives the open one that it was built for.)"""
    inputs, output = equation.replace(" ", "").split("->")
    data_term, kernel_term = inputs.split(",")
    head, _, tail = data_term.partition("...")
    sizes = dict(zip(kernel_term, kernel, strict=True))
    sizes |= dict(zip(head, data, strict=False))
    sizes |= dict(zip(reversed(tail), reversed(data), strict=False))
    between = data[len(head) : len(data) - len(tail)] if "..." in data_term else ()
    before, dots, after = output.partition("...")
    return (*(sizes[x] for x in before), *(between if dots else ()), *(sizes[x] for x in after))


def _from_end(term: str, letter: str) -> int:
    if "..." not in term:
        return term.index(letter) - len(term)
    head, tail = term.split("...")
    return tail.index(letter) - len(tail) if letter in tail else head.index(letter)


def inside(layer: Any) -> Iterator[Any]:
    """A layer and all layers inside it, each once, outer before inner."""
    seen: set[int] = set()
    pending = [layer]
    while pending:
        found = pending.pop(0)
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            pending = [*children(found), *pending]

"""Facts: what the planner knows of a model. Pure: shapes, paths and measured reaches; no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from unidist.algebra import Axes, Layout, Mesh, Sharding


@dataclass(frozen=True, slots=True)
class VariableFact:
    """A variable of the model.

    Attributes:
        is_weight: it is trained, or was before it was frozen.
        layer: the path of the layer that owns it.
        whole_dims: dims that pack several things, as the gates of an LSTM: a cut would not fall between them.
        is_of_module: a torch module reads it by itself, so it stays whole.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool = True
    is_weight: bool = True
    layer: str = ""
    whole_dims: frozenset[int] = frozenset()
    is_of_module: bool = False

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Affine:
    """A number of elements, by the sequence length, for one row of a batch: constant + slope * length."""

    constant: float = 0.0
    slope: float = 0.0

    def at(self, length: int) -> int:
        return round(self.constant + self.slope * length)

    def times(self, factor: float) -> Affine:
        return Affine(self.constant * factor, self.slope * factor)


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of elements: so many for each row of a batch, and so many however many rows there are."""

    each: Affine = Affine()
    once: Affine = Affine()

    def at(self, rows: int, length: int) -> int:
        return self.each.at(length) * rows + self.once.at(length)

    def times(self, factor: float) -> Amount:
        return Amount(self.each.times(factor), self.once.times(factor))


@dataclass(frozen=True, slots=True)
class Calls:
    """Holds what one step does with a layer.

    Attributes:
        taken, given: elements of each call's input and outputs.
        inputs: a number for each call's input: layers with a number in common take the same tensor.
        itemsize: bytes of an element of its outputs.
    """

    taken: tuple[Amount, ...] = ()
    given: tuple[Amount, ...] = ()
    inputs: tuple[int, ...] = ()
    itemsize: int = 4

    @property
    def count(self) -> int:
        """Returns how often the layer is called."""
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class LayerFact:
    """A layer whose kernel can be cut.

    Attributes:
        kind: "product" (Dense, EinsumDense), "table" (Embedding) or "convolution".
        kernel, bias: indices of its variables. `reverse`: a table's kernel back to the vocabulary, where it has one.
        outputs: kernel dim -> the bias's dim along it, None where the bias has none.
        inputs: kernel dims that the product sums over.
        beside: indices of what is cut as the kernel is, each with kernel dim -> its own dim along that one: low-rank
            kernels whose product is added to it (LoRA), scales and histories of a quantized one.
        calls: of a table: its look-ups. `scores`: a table's calls back to the vocabulary.
        read_elsewhere: whether something else reads its variables.
    """

    path: str
    kind: str
    kernel: int
    bias: int | None = None
    reverse: int | None = None
    outputs: dict[int, int | None] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    beside: tuple[tuple[int, dict[int, int]], ...] = ()
    calls: Calls = Calls()
    scores: Calls = Calls()
    read_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class StackFact:
    """A layer with kernels stacked along their first dim, as those of experts.

    Attributes:
        members: indices of the stacked variables. `size`: how many kernels are stacked.
        calls: what its calls take, where that is known. rows: how many rows each takes.
        chosen: for how many kernels a row has a weight; None: it was not looked at, or does not show.
    """

    path: str
    members: tuple[int, ...]
    size: int
    calls: Calls = Calls()
    rows: tuple[Amount, ...] = ()
    chosen: float | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """Says where a change of one slice of a layer's output arrives.

    Attributes:
        source: index of the layer; `dim`: the kernel dim along which its output was sliced.
        arrivals: (layer, kernel dim): products whose input changed in exactly that slice of a summed dim.
        spread: products whose input changed in another way.
        leaked: it also reached the model's output, or a loss.
        is_whole: False where it has spread and was followed no further.
    """

    source: int
    dim: int
    arrivals: tuple[tuple[int, int], ...] = ()
    spread: tuple[int, ...] = ()
    leaked: bool = False
    is_whole: bool = True

    @property
    def target(self) -> tuple[int, int] | None:
        """The one product, and its kernel dim, that takes the slices as they are; None: there is no such one."""
        return self.arrivals[0] if len(self.arrivals) == 1 and not self.spread and not self.leaked else None


@dataclass(frozen=True, slots=True)
class Activation:
    """A tensor that a step keeps for its backward.

    Attributes:
        dims: length of each dim, as a function of the sequence length; of those that grow with the rows, for one row.
        itemsize: bytes of an element.
        behind: of a tensor between the layers of pairs: the indices of the layers on whose outputs it depends.
        growing: how many dims grow with the rows of a batch.
        stack: of what a layer with so many stacked kernels computes, that number; else 0.
        again: of what backward computes again, the number of the layer that does; else 0.
    """

    dims: tuple[Affine, ...]
    itemsize: int
    behind: tuple[int, ...] = ()
    growing: int = 1
    stack: int = 0
    again: int = 0

    def lengths_at(self, length: int) -> tuple[float, ...]:
        """Returns the length of each dim, of one row, at a length of the sequence."""
        return tuple(dim.constant + dim.slope * length for dim in self.dims)

    def bytes_at(self, length: int, rows: int = 1) -> float:
        elements = prod(self.lengths_at(length))
        return float(elements * self.itemsize * rows**self.growing)


@dataclass(frozen=True, slots=True)
class Facts:
    """A model, as the planner sees it.

    Attributes:
        parts: into how many slices outputs were cut to find the reaches.
        slots: bytes of the optimizer's slots of each variable.
        read, kept: indices of the variables that a step reads, and of those whose values it keeps for its backward as
            they are, in its order; empty where that does not show.
        neighbours: the layers' own variables, in the order in which small neighbours are fetched together, where
            they are stored in parts over the data axes; (): each layer fetches its own, forward and again backward.
        is_open: whether its inputs leave the length of a sequence open.
    """

    name: str
    variables: tuple[VariableFact, ...]
    layers: tuple[LayerFact, ...]
    reaches: tuple[Reach, ...]
    parts: int
    slots: tuple[int, ...] = ()
    optimizer: str = ""
    activations: tuple[Activation, ...] = ()
    read: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    neighbours: tuple[tuple[int, ...], ...] = ()
    stacks: tuple[StackFact, ...] = ()
    is_open: bool = False


def meetings(facts: Facts) -> dict[int, list[int]]:
    """Returns for each product the layers whose outputs it works with as wholes, not slice by slice."""
    found: dict[int, dict[int, None]] = {}
    for reach in facts.reaches:
        for row in (*reach.spread, *(arrival for arrival, _ in reach.arrivals)):
            found.setdefault(row, {})[reach.source] = None
    return {row: list(sources) for row, sources in found.items()}


def low_rank_dims(ndim: int) -> tuple[dict[int, int], dict[int, int]]:
    """Returns of two kernels whose product is one of so many dims: its dims -> their own ones along these."""
    return {dim: dim for dim in range(ndim - 1)}, {ndim - 1: 1}


def layout_along(kernel: Layout, along: Mapping[int, int]) -> Layout:
    """Returns the layout of what goes along a kernel: kernel dim -> its own dim along that one."""
    axes = {own: kernel.dim_axes(dim) for dim, own in along.items()}
    return Layout(*(axes.get(own) for own in range(max(axes, default=-1) + 1)))


def cut_dim(dim: int, axes: Axes) -> Layout:
    """The layout with `axes` on one dim."""
    return Layout(*[None] * dim, axes)


def local_bytes(variable: VariableFact, layout: Layout, mesh: Mesh, size: int | None = None) -> int:
    """Returns the bytes of a variable on the device that holds most.

    With `size`: of something so many bytes large that is laid out alike.
    """
    parts = Sharding(mesh, layout, variable.shape).local_shape(mesh.devices[0])
    whole = prod(variable.shape)
    held = variable.bytes if size is None else size
    return held * prod(parts) // whole if whole else 0


def held_at_once(sizes: Iterable[tuple[int, float]]) -> float:
    """Returns the sum of all that is kept, and of the largest layer that backward computes again.

    Args:
        sizes: pairs of `Activation.again` and a number of bytes.
    """
    totals: dict[int, float] = {}
    for again, size in sizes:
        totals[again] = totals.get(again, 0) + size
    return totals.pop(0, 0) + max(totals.values(), default=0)

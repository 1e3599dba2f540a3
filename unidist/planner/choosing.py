"""Chooses cuts: the dims of variables that the model axes cut, and why.

Source of the pairs: Megatron-LM (Shoeybi et al., arXiv:1909.08053): a product cut by its outputs, followed by one cut
by its inputs, needs one all_reduce forward and one backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from unidist.algebra import Axes, Layout, Mesh
from unidist.planner.facts import Facts, LayerFact, Reach, StackFact, VariableFact, cut_dim, layout_along, meetings

# What no pair asks for is cut only where it pays: above this size, or this part of the model.
LARGE_BYTES = 1 << 20
LARGE_PART = 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """The layout of a variable, and the reason for it."""

    layout: Layout
    reason: str


class Chooser:
    """Chooses for one model on one mesh.

    Attributes:
        axes: the axes that may cut.
        experts: those that cut stacks of kernels: axes of their own, or the same.
        paired: the layers that were chosen for pairs.
    """

    def __init__(self, facts: Facts, mesh: Mesh, axes: Axes, experts: Axes = ()) -> None:
        self.facts = facts
        self.axes, self.experts = axes, experts or axes
        self.parts = mesh.axis_size(axes) if axes else 1
        self._for_experts = mesh.axis_size(self.experts) if self.experts else 1
        self.choices: dict[int, Choice] = {}
        self.paired: set[int] = set()
        total = sum(variable.bytes for variable in facts.variables)
        self.large = min(LARGE_BYTES, total * LARGE_PART)

    def choose(self) -> list[Choice]:
        """A choice for each variable, in their order."""
        if self.parts > 1:
            self._pairs()
            for layer in self.facts.layers:
                if layer.kernel not in self.choices:
                    self._alone(layer)
            for layer in self.facts.layers:
                if layer.kernel in self.choices:
                    self._as_kernel(layer)
        if self._for_experts > 1:
            for stack in self.facts.stacks:
                self._stack(stack)
        if self.parts > 1:
            for index, variable in enumerate(self.facts.variables):
                if index not in self.choices and variable.bytes >= self.large and variable.trainable:
                    self._gathered(index, variable)
        return self._settled()

    # pairs --------------------------------------------------------------------------------------------------------

    def _pairs(self) -> None:
        feeders: dict[tuple[int, int], list[Reach]] = {}
        for reach in self.facts.reaches:
            if reach.target is not None:
                feeders.setdefault(reach.target, []).append(reach)
        widest: dict[int, int] = {}
        for (row, _), reaches in feeders.items():
            widest[row] = max(widest.get(row, 0), *(self._bytes(reach.source) for reach in reaches))
        met = meetings(self.facts)
        for (row, dim), reaches in sorted(feeders.items()):
            layer = self.facts.layers[row]
            free = {reach.source: reach for reach in reaches if self._is_free(self.facts.layers[reach.source])}
            free.pop(row, None)
            if free and self._is_free(layer) and self._divides(layer.kernel, dim):
                self.paired |= {row, *free}
                self._pair(layer, dim, list(free.values()))
                self._beside(layer, met[row], widest[row])

    def _is_free(self, layer: LayerFact) -> bool:
        return layer.kernel not in self.choices and not layer.read_elsewhere

    def _pair(self, row: LayerFact, dim: int, reaches: list[Reach]) -> None:
        columns = [self.facts.layers[reach.source] for reach in reaches]
        names = ", ".join(nearby(layer.path, row.path) for layer in columns)
        for reach, layer in zip(reaches, columns, strict=True):
            self._cut_outputs(layer, reach.dim, f"column: first of a pair with {nearby(row.path, layer.path)}")
        self.choices[row.kernel] = Choice(cut_dim(dim, self.axes), f"row: second of a pair with {names}")
        if row.bias is not None:
            self.choices[row.bias] = Choice(Layout(), "replicated: added once to the sum")

    def _beside(self, layer: LayerFact, sources: list[int], widest: int) -> None:
        """Cuts small products that meet a pair without dividing, as keys and values of few heads.

        Each device needs all their outputs beside its own heads. They are cut by the outputs that do divide, as the
        features of a head: with their gradients' sum that sends what replicas would.

        Args:
            layer: the second of the pair. sources: whose outputs it works with. widest: bytes of the largest of those
                that are joined with it.
        """
        for source in sources:
            other = self.facts.layers[source]
            dims = [dim for dim in sorted(other.outputs, reverse=True) if self._divides(other.kernel, dim)]
            if dims and other.kernel not in self.choices and 2 * self._bytes(source) <= widest:
                shape = self.facts.variables[other.kernel].shape
                why = f"{shape} has no {self.parts} equal parts that meet those of {nearby(layer.path, other.path)}"
                self._cut_outputs(other, dims[0], f"column: its outputs are gathered, {why}")

    def _as_kernel(self, layer: LayerFact) -> None:
        kernel = self.choices[layer.kernel].layout
        for index, along in layer.beside:
            layout = layout_along(kernel, along)
            reason = (
                "as its layer's kernel" if layout.dims else "replicated: its layer's kernel is cut along another dim"
            )
            self.choices[index] = Choice(layout, reason)

    def _bytes(self, layer: int) -> int:
        return self.facts.variables[self.facts.layers[layer].kernel].bytes

    def _cut_outputs(self, layer: LayerFact, dim: int, reason: str) -> None:
        self.choices[layer.kernel] = Choice(cut_dim(dim, self.axes), reason)
        if layer.bias is not None:
            along = layer.outputs[dim]
            layout = Layout() if along is None else cut_dim(along, self.axes)
            self.choices[layer.bias] = Choice(layout, "as its kernel's outputs")

    # alone --------------------------------------------------------------------------------------------------------

    def _alone(self, layer: LayerFact) -> None:
        if self.facts.variables[layer.kernel].bytes < self.large:
            return
        if layer.kind == "table":
            self._table(layer)
            return
        # The last dim first: shards of it are what every framework's product and convolution take as they are.
        outputs = [dim for dim in sorted(layer.outputs, reverse=True) if self._divides(layer.kernel, dim)]
        inputs = [dim for dim in layer.inputs if self._divides(layer.kernel, dim)]
        if outputs:
            what = "convolution" if layer.kind == "convolution" else "column"
            self._cut_outputs(layer, outputs[0], f"{what}: its outputs are gathered")
        elif inputs:
            self.choices[layer.kernel] = Choice(cut_dim(inputs[0], self.axes), "row: its inputs are cut")

    def _table(self, layer: LayerFact) -> None:
        for index, (vocabulary, features) in ((layer.kernel, (0, 1)), (layer.reverse, (1, 0))):
            if index is None:
                continue
            size = self.facts.variables[index].shape[vocabulary]
            if self._divides(index, vocabulary):
                self.choices[index] = Choice(cut_dim(vocabulary, self.axes), f"vocabulary: {size:,} entries")
            elif self._divides(index, features):
                reason = f"features: {size:,} entries do not divide by {self.parts}"
                self.choices[index] = Choice(cut_dim(features, self.axes), reason)

    def _stack(self, stack: StackFact) -> None:
        size = sum(self.facts.variables[index].bytes for index in stack.members)
        if size >= self.large and stack.size % self._for_experts == 0:
            choice = Choice(
                cut_dim(0, self.experts), f"stack: each device computes with its own of {stack.size} kernels"
            )
            self.choices.update(dict.fromkeys(stack.members, choice))

    def _gathered(self, index: int, variable: VariableFact) -> None:
        dims = [dim for dim in range(len(variable.shape)) if self._divides(index, dim)]
        free = [dim for dim in dims if dim not in variable.whole_dims]
        if variable.is_of_module:
            self.choices[index] = Choice(Layout(), "replicated: its torch module reads it itself")
        elif free:
            self.choices[index] = Choice(cut_dim(free[0], self.axes), "gathered: for each call of its layer")
        elif dims:
            reason = f"replicated: a cut of dim {dims[0]} would run through gates"
            self.choices[index] = Choice(Layout(), reason)

    def _divides(self, index: int, dim: int) -> bool:
        size = self.facts.variables[index].shape[dim]
        return size >= self.parts and size % self.parts == 0

    # all ----------------------------------------------------------------------------------------------------------

    def _settled(self) -> list[Choice]:
        variables = self.facts.variables
        out = [self.choices.get(k) or self._whole(v) for k, v in enumerate(variables)]
        found: dict[str, set[Layout]] = {}
        for choice, variable in zip(out, variables, strict=True):
            found.setdefault(variable.path, set()).add(choice.layout)
        clash = "replicated: another variable of this path has another layout"
        return [
            Choice(Layout(), clash) if len(found[v.path]) > 1 else choice
            for choice, v in zip(out, variables, strict=True)
        ]

    def _whole(self, variable: VariableFact) -> Choice:
        if self.parts == 1:
            return Choice(Layout(), "replicated: the mesh has no model axis of several devices")
        if variable.bytes < self.large or not variable.trainable:
            return Choice(Layout(), f"replicated: {size_text(variable.bytes)}")
        return Choice(Layout(), f"replicated: no dim of {variable.shape} divides by {self.parts}")


def nearby(path: str, seen_from: str) -> str:
    """A path without what it has in common with another."""
    parts, others = path.split("/"), seen_from.split("/")
    while len(parts) > 1 and others and parts[0] == others[0]:
        parts, others = parts[1:], others[1:]
    return "/".join(parts)


def size_text(size: float) -> str:
    """Bytes for people: 4 KB, 1.5 MB."""
    units = ("B", "KB", "MB", "GB", "TB")
    power = min(len(str(int(size))) // 3 if size >= 1000 else 0, len(units) - 1)
    power -= power > 0 and size < 1000**power
    size /= 1000**power
    return f"{size:.0f} {units[power]}" if size >= 100 or size == int(size) else f"{size:.1f} {units[power]}"

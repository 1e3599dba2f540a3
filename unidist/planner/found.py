"""FoundLayouts: the rule of a strategy whose layouts are found when its models are known."""

from __future__ import annotations

from collections.abc import Iterable

from unidist.algebra import Axes, Layout, Mesh
from unidist.planner.choosing import LARGE_BYTES
from unidist.planner.facts import cut_dim, layout_along, low_rank_dims
from unidist.planner.layout_map import LayoutMap
from unidist.planner.plan import Plan

# Bytes of the elements that most variables are made of.
_ELEMENT = 4
# Keras's names of the two kernels whose product is added to another.
_LOW_RANK = ("lora_kernel_a", "lora_kernel_b")


class FoundLayouts:
    """Layouts by path and shape, filled from plans.

    A variable that is made before its model is whole is laid out by a rule of its shape alone. A large one is cut over
    the model axes along its last dim that divides, so that no device ever holds all of it; the plan moves it later.

    Attributes:
        layout_map: the sharded variables of all plans so far.
        shared: path of a layer -> the axes of pairs that work with its whole outputs.
    """

    def __init__(self, mesh: Mesh, axes: Axes) -> None:
        self.layout_map = LayoutMap(mesh, strict=False)
        self._axes = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
        self._parts = mesh.axis_size(self._axes) if self._axes else 1
        self.shared: dict[str, Axes] = {}
        self._known: dict[tuple[str, tuple[int, ...]], Layout] = {}

    def layout_for(self, path: str, shape: tuple[int, ...]) -> Layout:
        found = self._known.get((path, tuple(shape)))
        if found is not None:
            return found
        owner, _, name = path.rpartition("/")
        if name in _LOW_RANK and f"{owner}/kernel" in self.layout_map:  # added since the plan was made
            kernel = self.layout_map[f"{owner}/kernel"]
            dims = low_rank_dims(max(len(kernel.dims), len(shape)))
            return layout_along(kernel, dims[_LOW_RANK.index(name)])
        return self._at_first(tuple(shape))

    def knows(self, variables: Iterable[tuple[str, tuple[int, ...]]]) -> bool:
        """Returns whether plans have said how all these variables (path, shape) are laid out."""
        return all(variable in self._known for variable in variables)

    def add(self, plan: Plan) -> None:
        """Takes what a plan says."""
        self.shared.update(plan.shared)
        for row in plan.rows:
            self._known[row.path, row.shape] = row.layout
            if row.is_sharded and row.path not in self.layout_map:
                self.layout_map[row.path] = row.layout

    def keep_whole(self, variables: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Notes as whole those of these variables (path, shape) that no plan has."""
        for variable in variables:
            self._known.setdefault(variable, Layout())

    def _at_first(self, shape: tuple[int, ...]) -> Layout:
        size = _ELEMENT
        for n in shape:
            size *= n
        dims = [dim for dim, n in enumerate(shape) if n and n % self._parts == 0]
        if self._parts == 1 or size < LARGE_BYTES or len(shape) < 2 or not dims:
            return Layout()
        return cut_dim(dims[-1], self._axes)

"""The one rule: a strategy chooses three layouts per variable.

Everything else is redistribution between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unidist.algebra import Axes, Layout, Mesh
from unidist.errors import ArgumentError, MeshError
from unidist.strategies.zero import STAGES, spread

Rule = Callable[[str, tuple[int, ...]], Layout]
# The names of axes that cut sequences, and stacks of kernels.
CONTEXT, EXPERT = "context", "expert"
# Which weights layers use on parts of sequences; None: there are no such parts.
InParts = Literal["whole", "all"] | None


@dataclass(frozen=True, slots=True)
class VariableLayouts:
    """The layouts of one variable.

    Attributes:
        storage: where the value rests.
        compute: where a layer needs it: storage, but fanned out over the data axes, since each data shard uses it
            for its own rows and so its gradient arrives partial there.
        state: where its gradient is reduced to and its optimizer slots live.
    """

    storage: Layout
    compute: Layout
    state: Layout


def replicated(path: str, shape: tuple[int, ...]) -> Layout:
    """The rule of data parallelism."""
    return Layout()


@dataclass(frozen=True)
class Strategy:
    """A mesh, the axes that cut the batch, and a rule for the variables.

    Attributes:
        zero: 0: every data shard keeps everything; 1 or 2: gradients are reduced to, and slots live in, shards over
            the data axes; 3: the values rest there too. Only `variable` looks at it: all else follows the layouts.
        uneven: whether a variable may be cut into shards of different sizes.
        joint: whether one dim of a variable may be cut by several axes.
        sequence_parallel: what stands between layers with cut kernels is cut too, along the sequence (dim 1).
        context_axes: those that cut sequences, from a model's inputs to its outputs.
        attention: how attention reads places of other parts there: "auto", "ulysses", "gather" or "ring".
        exact_random: layers draw one device's random numbers.
        per_tensor_rows: tensors of a batch that have other numbers of rows are cut each by its own.
        remat: which layers backward computes again, as in unidist/keras/recomputing.py.
        experts: which rows stacked kernels compute: "all", or by "dispatch" those that they have a weight for.
        expert_axes: those that cut stacks of kernels, and nothing else of a model. Where they cut the batch too, a
            layer sees its own kernels of the stack, and their gradients are whole along these axes.
        shard_axes: the data axes that ZeRO cuts over, given as one name or several; None: all. The others hold replicas
            of the shards.
        offload: what rests in host memory between steps: "none", or the optimizer's "states".

    Raises:
        MeshError: a data axis that the mesh has not, or a shard axis that is no data axis.
        ArgumentError: an unknown stage.
    """

    mesh: Mesh
    data_axes: Axes
    rule: Rule = field(default=replicated, compare=False)
    auto_shard_dataset: bool = True
    zero: int = 0
    uneven: bool = True
    joint: bool = True
    sequence_parallel: bool = False
    context_axes: Axes = ()
    attention: str = "auto"
    exact_random: bool = False
    per_tensor_rows: bool = False
    remat: str | Callable[[Any], bool] = field(default="none", compare=False)
    experts: str = "all"
    shard_axes: str | Axes | None = None
    offload: str = "none"
    expert_axes: Axes = ()

    def __post_init__(self) -> None:
        self.mesh.check_axes(self.data_axes)
        # True is 1 to Python.
        if isinstance(self.zero, bool) or self.zero not in STAGES:
            raise ArgumentError(f"zero={self.zero!r}: a stage of ZeRO is one of {STAGES}")
        named = self.data_axes if self.shard_axes is None else self.mesh.check_axes(self.shard_axes)
        if strange := [axis for axis in named if axis not in self.data_axes]:
            raise MeshError(
                f"shard_axis={strange[0]!r}: the data axes of {self.mesh} are {self.data_axes}, and ZeRO cuts over "
                "these alone. Name one of them, or name more by data_axis"
            )
        object.__setattr__(self, "shard_axes", tuple(axis for axis in self.data_axes if axis in named))

    @property
    def model_axes(self) -> Axes:
        return tuple(axis for axis in self.mesh.axis_names if axis not in (*self.data_axes, *self.context_axes))

    @property
    def in_parts(self) -> InParts:
        """Says which weights layers use on parts of sequences, "whole" ones or "all"; None: no parts."""
        if self.context_axes:
            return "all"
        return "whole" if self.sequence_parallel else None

    @property
    def data_shards(self) -> int:
        """Into how many parts a batch is cut."""
        return self.mesh.axis_size(self.data_axes) if self.data_axes else 1

    def variable(self, path: str, shape: tuple[int, ...]) -> VariableLayouts:
        """The layouts of a variable, by its path and global shape."""
        ruled = self.rule(path, shape)
        kept = set(ruled.dim_axes(0)) & set(self.expert_axes)
        compute = ruled.with_axis(tuple(axis for axis in self.data_axes if axis not in kept), "F")
        if not self.zero:
            return VariableLayouts(storage=ruled, compute=compute, state=ruled)
        axes = self.mesh.check_axes(self.shard_axes)
        state = spread(ruled, shape, axes, self.mesh, uneven=self.uneven, joint=self.joint)
        return VariableLayouts(storage=state if self.zero == 3 else ruled, compute=compute, state=state)

    def cuts_places(self, shape: tuple[int, ...], is_float: bool) -> bool:
        """Says whether the context axes cut dim 1 of a model's input: tokens, masks, or numbers of each place.

        Rows of features have no places. What has fewer of them than there are parts stays whole.
        """
        is_sequence = len(shape) > 2 or (len(shape) == 2 and not is_float)
        return bool(self.context_axes) and is_sequence and shape[1] >= self.mesh.axis_size(self.context_axes)

    def with_rule(self, layout: Layout) -> Strategy:
        """The same strategy for variables that are all laid out alike."""
        return replace(self, rule=lambda path, shape: layout)

    def batch(self) -> Layout:
        """The layout of a batch: its first dim over the data axes."""
        return Layout(self.data_axes) if self.data_axes else Layout()


def choose_axes(
    mesh: Mesh,
    data_axis: str | Axes | None,
    model_axis: str | Axes | None,
    context_axes: Axes = (),
    expert_axes: Axes = (),
) -> tuple[Axes, Axes]:
    """(data axes, model axes) of a model-parallel mesh.

    Named ones are taken as they are. Otherwise an axis called "data" or "batch" is the data axis; without such a
    name the first of several axes is, and a mesh of one axis is all model. Axes of experts cut the batch too.

    Raises:
        MeshError: an unknown axis, or one named for both.
    """
    others = tuple(axis for axis in mesh.axis_names if axis not in context_axes)
    if data_axis is not None:
        data = mesh.check_axes(data_axis)
    elif model_axis is not None:
        taken = mesh.check_axes(model_axis)
        data = tuple(axis for axis in others if axis not in taken)
    else:
        named = tuple(axis for axis in others if axis in ("data", "batch", *expert_axes))
        data = named or (others[:1] if len(others) > 1 else ())
    if model_axis is not None:
        model = mesh.check_axes(model_axis)
    else:
        model = tuple(axis for axis in others if axis not in (*data, *expert_axes))
    for one, other, names in (
        (data, model, "a data and a model"),
        ((*data, *model, *expert_axes), context_axes, "a context and another"),
    ):
        if both := set(one) & set(other):
            raise MeshError(f"axis {sorted(both)[0]!r} cannot be both {names} axis of {mesh}")
    return data, model


def named_axes(mesh: Mesh, given: str | Axes | None, name: str) -> Axes:
    """The axes that are given, else the one of this name, if there is one.

    Raises:
        MeshError: an unknown axis.
    """
    if given is not None:
        return mesh.check_axes(given)
    return tuple(axis for axis in mesh.axis_names if axis == name)

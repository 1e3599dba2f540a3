"""DataParallel and ModelParallel: strategies that are Distributions to Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from unidist import session
from unidist.algebra import Axes, Layout, Mesh
from unidist.array import as_layout, as_mesh, set_mesh_in_use
from unidist.backends import registry
from unidist.errors import CapabilityError, LayoutError, MeshError
from unidist.keras import driver
from unidist.keras.feed.dataset_shard import own_part
from unidist.keras.patching import patches
from unidist.keras.patching.compat import Distribution
from unidist.keras.recomputing import Remat
from unidist.keras.strategies.layout_maps import KerasRules, as_layout_map, keras_layout, keras_mesh, mesh_of_map
from unidist.keras.strategies.options import Attention, Experts, contexts, options, takes_uneven
from unidist.planner.found import FoundLayouts
from unidist.planner.layout_map import LayoutMap, check_variable
from unidist.strategies import Strategy
from unidist.strategies.strategy import choose_axes, choose_context, replicated

# The strategy that was made last, and the adapter that was in use then.
_made: list[tuple[Any, UnidistDistribution]] = []


class UnidistDistribution(Distribution):  # type: ignore[misc]
    """A Keras Distribution made from a Strategy; the base of DataParallel and ModelParallel.

    Attributes:
        found: the layouts found so far, of a strategy that finds them by itself; else None.
        model_axes: the axes that may cut variables then.
    """

    found: FoundLayouts | None = None
    model_axes: Axes = ()

    def __init__(self, strategy: Strategy, layout_map: LayoutMap | None = None) -> None:
        adapter = session.backend()
        if type(self) is not UnidistDistribution or adapter.capabilities.view == "local":
            _check_fills(strategy.mesh)  # Keras's own strategies leave devices out where its backend serves that
        adapter.mesh(strategy.mesh)
        patches.check()
        driver.check(strategy, layout_map)
        self.strategy = strategy
        self.layout_map = layout_map
        batch = strategy.data_axes[0] if strategy.data_axes else None
        super().__init__(keras_mesh(strategy.mesh), batch, strategy.auto_shard_dataset)
        # Keras asks its own backend, which over Horovod on TensorFlow knows of no processes.
        self._num_processes, self._process_id = session.process_count(), session.process_index()
        self._is_multi_process = self._num_processes > 1
        if type(self) is not UnidistDistribution:
            _made[:] = [(adapter, self)]

    @property
    def mesh(self) -> Mesh:
        return self.strategy.mesh

    @property
    def num_model_replicas(self) -> int:
        return self.strategy.data_shards

    def distribute_dataset(self, dataset: Any) -> Any:
        """Returns the process's rows of a batched tf.data.Dataset by Keras's rule: part k of the k-th process.

        In one process, and with `auto_shard_dataset=False`, the dataset itself.

        Raises:
            ArgumentError: no batched tf.data.Dataset, or its batches do not divide.
            LayoutError: the devices of a process hold other rows than its part.
        """
        if not self._is_multi_process or not self.auto_shard_dataset:
            return dataset
        return own_part(dataset, self.strategy, self._process_id, self._num_processes)

    def get_data_layout(self, data_shape: Any) -> Any:
        layout = self.strategy.batch() if len(data_shape) else Layout()
        return keras_layout(layout, tuple(data_shape), self.mesh, self.device_mesh)

    def get_variable_layout(self, variable: Any) -> Any:
        given = getattr(variable, "_layout", None)
        if given is not None:
            return given
        shape = tuple(variable.shape)
        storage = self.strategy.variable(variable.path, shape).storage
        return keras_layout(storage, shape, self.mesh, self.device_mesh)

    def get_tensor_layout(self, path: str) -> Any:
        return None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Makes this Keras's distribution: variables built inside are created in their layouts."""
        driver.align_seeds()
        with super().scope():
            yield

    def check_model(self, paths: list[str], outputs: list[str]) -> None:
        """Raises LayoutError where a strict rule matches none of the model's variables.

        Keras's maps also hold the layouts of the outputs of layers.
        """
        if self.layout_map is not None:
            self.layout_map.check_used([*paths, *outputs] if isinstance(self.layout_map, KerasRules) else paths)


class DataParallel(UnidistDistribution):
    """Every device holds the whole model and computes a part of each batch.

    Args:
        mesh: a Mesh or Keras DeviceMesh; None: all devices on one axis, "data".
        data_axis: the axis or axes that cut the batch; None: all of them.
        zero: 1 or 2: each data shard reduces, and keeps the optimizer's slots of, its part of each variable; 3: it
            keeps only its part of the variables too, and gathers a layer's for its call (ZeRO, FSDP).
        auto_shard_dataset: each process reads its part of the data that every process was given. False: each
            process was given its own part.
        exact_random: layers that draw (dropout, noise, augmentation) draw one device's numbers for the whole batch, and
            each device keeps those of its rows. By default devices draw apart on torch. On JAX numbers are one
            device's in any case. Where torch draws in the memory order of a transposed input, numbers are those of
            the same shape in row-major order.
        per_tensor_rows: a batch whose tensors have other numbers of rows, as nodes, edges and graphs, is cut tensor by
            tensor, each along its first dim. Layers and losses see wholes. By default each device computes all of such
            a batch on torch. On JAX each tensor is cut by itself in any case.
        remat: which layers keep their inputs alone, and are computed again in backward: less memory, a third more
            work. "block": layers that hold others, and of whose class several stand side by side, as transformers'
            blocks. "attention": layers whose class ends in "Attention". A function of a layer: those that it is true
            for. Numbers stay as they are, drawn ones too.
        experts: "dispatch": of layers with stacked kernels each kernel computes the rows that it has a weight for,
            where their outputs are multiplied by weights and summed. "all": it computes all rows. Keras on torch only.
        shard_axis: the data axis or axes that `zero` cuts over; None: all. Along the others are replicas of the shards,
            which sum gradients of one shard's size (HSDP: Zhao et al. 2023, arXiv:2304.11277).

    Raises:
        MeshError: the mesh does not fit the devices, or `shard_axis` is no data axis.
        ArgumentError: `zero` is no stage, or 0 with `shard_axis`; `remat` or `experts` is no choice.
        CapabilityError: `exact_random`, `per_tensor_rows` or `remat` with Keras on TensorFlow; `experts` as above.

    Example:
        >>> import keras, numpy as np, unidist
        >>> _ = unidist.use("sim", devices=4)
        >>> with unidist.DataParallel(zero=1).scope():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="adam", loss="mse")
        >>> _ = model.fit(np.ones((16, 8)), np.ones((16, 1)), batch_size=8, verbose=0)
        >>> unidist.describe(model).bytes_of("weights")
        36
    """

    def __init__(
        self,
        mesh: Any = None,
        *,
        data_axis: str | Axes | None = None,
        zero: int = 0,
        auto_shard_dataset: bool = True,
        exact_random: bool = False,
        per_tensor_rows: bool = False,
        remat: Remat = "none",
        experts: Experts = "all",
        shard_axis: str | Axes | None = None,
    ) -> None:
        grid = _mesh_or_all(mesh, "data")
        axes = grid.axis_names if data_axis is None else grid.check_axes(data_axis)
        more = options(auto_shard_dataset, zero, False, exact_random, per_tensor_rows, remat, experts, shard_axis)
        super().__init__(Strategy(grid, axes, replicated, **more))


class ModelParallel(UnidistDistribution):
    """Shards variables by a LayoutMap's rules, or as unidist finds; batches over the data axis, if any.

    With "auto" the plan (unidist.plan) is made when a model is whole: by parallelize, or at its first fit, evaluate or
    predict. Variables made in the scope before that are laid out by their shapes alone, and are moved once, one by one.

    Args:
        mesh: a Mesh or Keras DeviceMesh; None: the layout map's mesh, or all devices on one axis, "model".
        layout_map: "auto", or a LayoutMap of unidist or of Keras.
        data_axis: the axis or axes that cut the batch. None: the axis named "data" or "batch", else the first of
            several axes, else none.
        model_axis: the axes of the rules; None: all others.
        zero: 1 or 2: each data shard reduces, and keeps the optimizer's slots of, its part of each variable; 3: it
            keeps only its part of the variables too, and gathers a layer's for its call (ZeRO, FSDP).
        auto_shard_dataset: see DataParallel.
        context_axis: the axes that cut sequences. None: the axis named "context", if there is one. Dim 1 of inputs of
            whole numbers, or of three dims or more, is cut, and each device holds its places of all that the model
            makes of them. Weights are whole along these axes. Keras on torch, where lengths need not divide, or on JAX.
        attention: how places of other devices are read: "gather" gathers keys and values, "ulysses" turns queries, keys
            and values to heads and back by all_to_all (Jacobs et al. 2023, arXiv:2309.14509). "auto": whichever sends
            less, product by product. On JAX the compiler chooses, and only "auto" goes.
        sequence_parallel: between a layer whose sum is reduced and the next one with a cut kernel each device holds a
            part of the sequence (dim 1 of what has three dims or more): reduce_scatter and all_gather in place of
            all_reduce, and norms, dropout and residual sums on a part of the activations (Korthikanti et al. 2022,
            arXiv:2205.05198). Keras on torch only.
        per_tensor_rows: see DataParallel.
        remat, experts, shard_axis: see DataParallel.
        exact_random: see DataParallel. Pairs of layers between which a layer draws are not used: they gather.

    Raises:
        MeshError: the mesh does not fit the devices.
        LayoutError: the layout map is for another mesh.
        CapabilityError: the backend in use cannot do it.
        ArgumentError: `zero` is no stage, or `remat` no choice.

    Example:
        >>> import keras, numpy as np, unidist
        >>> _ = unidist.use("sim", devices=4)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
        >>> _ = unidist.parallelize(model, unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2})))
        >>> model.compile(optimizer="adam", loss="mse")
        >>> _ = model.fit(np.ones((16, 8)), np.ones((16, 1)), batch_size=8, verbose=0)
        >>> [row.local_shape for row in unidist.describe(model).sharded][:3]
        [(8, 8), (8,), (8, 1)]
    """

    def __init__(
        self,
        mesh: Any = None,
        layout_map: Any = "auto",
        *,
        data_axis: str | Axes | None = None,
        model_axis: str | Axes | None = None,
        zero: int = 0,
        auto_shard_dataset: bool = True,
        context_axis: str | Axes | None = None,
        attention: Attention = "auto",
        sequence_parallel: bool = False,
        exact_random: bool = False,
        per_tensor_rows: bool = False,
        remat: Remat = "none",
        experts: Experts = "all",
        shard_axis: str | Axes | None = None,
    ) -> None:
        cut = auto_shard_dataset, zero, sequence_parallel
        more = options(*cut, exact_random, per_tensor_rows, remat, experts, shard_axis)
        if isinstance(layout_map, str):
            grid = _mesh_or_all(mesh, "model")
        else:
            grid = as_mesh(mesh) if mesh is not None else mesh_of_map(layout_map)
        context = choose_context(grid, context_axis)
        more |= contexts(context, attention, sequence_parallel)
        if isinstance(layout_map, str):
            self._find(layout_map, grid, data_axis, model_axis, more)
            return
        rules = as_layout_map(layout_map, grid)
        if rules.mesh != grid:
            raise LayoutError(f"the layout map is for {rules.mesh}, the strategy for {grid}: use one mesh")
        data, _ = choose_axes(grid, data_axis, model_axis, context)
        strategy = Strategy(grid, data, _layouts_of(rules), **more)
        super().__init__(strategy, rules)

    def _find(self, how: str, mesh: Mesh, data_axis: Any, model_axis: Any, more: dict[str, Any]) -> None:
        if how != "auto":
            raise LayoutError(f"layout_map={how!r}: give a LayoutMap, or 'auto' to have the layouts found")
        data, self.model_axes = choose_axes(mesh, data_axis, model_axis, more["context_axes"])
        self.found = FoundLayouts(mesh, self.model_axes)
        strategy = Strategy(mesh, data, self.found.layout_for, **more)
        super().__init__(strategy, self.found.layout_map)


def adopt(distribution: Any) -> UnidistDistribution:
    """Ours as it is; a keras.distribution strategy as one of ours, with the same mesh and layouts."""
    if isinstance(distribution, UnidistDistribution):
        return distribution
    cached = getattr(distribution, "_unidist", None)
    if cached is None:
        mesh = as_mesh(distribution.device_mesh)
        batch = distribution.batch_dim_name
        layout_map = getattr(distribution, "_layout_map", None)
        if isinstance(layout_map, keras.distribution.LayoutMap):
            rules: LayoutMap | None = as_layout_map(layout_map, mesh)
        else:
            rules = None

        def rule(path: str, shape: tuple[int, ...]) -> Layout:
            found = distribution.get_variable_layout(_PathAndShape(path, shape))
            return check_variable(path, shape, as_layout(found), mesh)

        axes = (batch,) if batch is not None else ()
        cached = UnidistDistribution(Strategy(mesh, axes, rule, distribution.auto_shard_dataset), rules)
        distribution._unidist = cached
    return cached


def current() -> UnidistDistribution | None:
    """Keras's distribution of this thread as one of ours, or None."""
    found = keras.distribution.distribution()
    return None if found is None else adopt(found)


def made() -> UnidistDistribution | None:
    """Returns the last DataParallel or ModelParallel made for the devices in use; None: there is none."""
    return next((one for adapter, one in _made if registry.has_current() and adapter is registry.current()), None)


def _mesh_in_use() -> Mesh | None:
    strategy = current()
    return None if strategy is None else strategy.mesh


set_mesh_in_use(_mesh_in_use)


class _PathAndShape:
    """Holds what a Distribution asks of a variable."""

    _layout = None

    def __init__(self, path: str, shape: tuple[int, ...]) -> None:
        self.path = path
        self.shape = shape


def _check_fills(mesh: Mesh) -> None:
    """Raises MeshError where a mesh leaves devices out: they would idle, or fail alone."""
    count, size = len(session.list_devices()), mesh.size
    if size >= count:
        return
    entry, name = registry.in_use(), session.backend().name
    start = f"`unidist run -n {size} script.py`" if entry.one_device else f"unidist.use({name!r}, devices={size})"
    raise MeshError(
        f"{mesh} has {size} of the {count} devices, and a model trains on all of them: make a mesh of {count} (a size "
        f"of -1 takes what is left), or start {size}: {start}"
    )


def _mesh_or_all(mesh: Any, axis: str) -> Mesh:
    return Mesh({axis: len(session.list_devices())}) if mesh is None else as_mesh(mesh)


def _layouts_of(rules: LayoutMap) -> Callable[[str, tuple[int, ...]], Layout]:
    """The map's layouts; what only an uneven map allows is refused where Keras's arrays must divide."""
    if takes_uneven() or not rules.uneven:
        return rules.layout_for

    def even(path: str, shape: tuple[int, ...]) -> Layout:
        layout = rules.layout_for(path, shape)
        for dim, axes in enumerate(layout.dims):
            if axes and shape[dim] % rules.mesh.axis_size(axes):
                raise CapabilityError(
                    f"variable {path!r} of shape {shape}: dim {dim} does not divide over {axes}, and Keras on "
                    f"{keras.config.backend()} has no shards of different sizes: uneven=True is for torch. Leave the "
                    "variable out of the layout map, or use a mesh that divides it"
                )
        return layout

    return even

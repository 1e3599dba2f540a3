"""DataParallel and ModelParallel: the strategies and their options."""

from __future__ import annotations

from typing import Any

from unidist import session
from unidist.algebra import Axes, Mesh
from unidist.array import as_mesh
from unidist.errors import LayoutError
from unidist.keras.recomputing import Remat
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.strategies.layout_maps import as_layout_map, layouts_of, mesh_of_map
from unidist.keras.strategies.options import Attention, Experts, Offload, contexts, for_experts, options
from unidist.planner.found import FoundLayouts
from unidist.strategies import Strategy
from unidist.strategies.strategy import CONTEXT, EXPERT, choose_axes, named_axes, replicated


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
            each device keeps those of its rows. By default devices draw apart on torch. On JAX and DTensor
            numbers are one device's in any case. Where torch draws in the memory order of a transposed input, numbers
            are those of the same shape in row-major order.
        per_tensor_rows: a batch whose tensors have other numbers of rows, as nodes, edges and graphs, is cut tensor by
            tensor, each along its first dim. Layers and losses see wholes. By default each device computes all of such
            a batch on torch. On JAX each tensor is cut by itself in any case.
        remat: which layers keep their inputs alone, and are computed again in backward: less memory, a third more
            work. "block": layers that hold others, and of whose class several stand side by side, as transformers'
            blocks. "attention": layers whose class ends in "Attention". A function of a layer: those that it is true
            for. Numbers stay as they are, drawn ones too.
        experts: "dispatch": of layers with stacked kernels each kernel computes the rows that it has a weight for,
            where their outputs are multiplied by weights and summed. "all": it computes all rows. On torch or JAX.
        shard_axis: the data axis or axes that `zero` cuts over; None: all. Along the others are replicas of the shards,
            which sum gradients of one shard's size (HSDP: Zhao et al. 2023, arXiv:2304.11277).
        offload: "states": the optimizer's slots rest in host memory. An update brings those of 32 MB of weights at a
            time to the device, and back; sums of accumulated gradients come all at once. Keras on torch only.

    Raises:
        MeshError: the mesh does not fit the devices, or `shard_axis` is no data axis.
        ArgumentError: `zero` is no stage, or 0 with `shard_axis`; `remat`, `experts` or `offload` is no choice.
        CapabilityError: `per_tensor_rows` or `remat` with Keras on TensorFlow; others as above.

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
        offload: Offload = "none",
    ) -> None:
        grid = _mesh_or_all(mesh, "data")
        axes = grid.axis_names if data_axis is None else grid.check_axes(data_axis)
        more = options(
            auto_shard_dataset=auto_shard_dataset,
            zero=zero,
            shard_axis=shard_axis,
            exact_random=exact_random,
            per_tensor_rows=per_tensor_rows,
            remat=remat,
            experts=experts,
            offload=offload,
        )
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
        model_axis: the axes of the rules; None: all others, but those of experts.
        zero: 1 or 2: each data shard reduces, and keeps the optimizer's slots of, its part of each variable; 3: it
            keeps only its part of the variables too, and gathers a layer's for its call (ZeRO, FSDP).
        auto_shard_dataset: see DataParallel.
        context_axis: the axes that cut sequences. None: the axis named "context", if there is one. Dim 1 of inputs of
            whole numbers, or of three dims or more, is cut, and each device holds its places of all that the model
            makes of them. Weights are whole along these axes. Keras on torch, where lengths need not divide, or on JAX.
        expert_axis: the axes that cut stacks of kernels, as experts are, and no other weights. None: the axis named
            "expert", if there is one. They cut the batch too, unless `data_axis` says otherwise. With
            experts="dispatch" rows are then sent to the devices of their kernels by an uneven all_to_all (on JAX all
            rows are gathered, and sums scattered); else kernels are gathered (GShard: Lepikhin et al. 2020,
            arXiv:2006.16668). Keras on torch or JAX.
        attention: how places of other devices are read: "gather" gathers keys and values, "ulysses" turns queries, keys
            and values to heads and back by all_to_all (Jacobs et al. 2023, arXiv:2309.14509). "auto": whichever sends
            less, product by product. "ring": keys and values go round (Liu et al. 2023, arXiv:2310.01889), for lengths
            whose keys do not fit; it takes layers that call dot_product_attention, without dropout, and refuses others.
            On JAX the compiler chooses, and only "auto" goes.
        sequence_parallel: between a layer whose sum is reduced and the next one with a cut kernel each device holds a
            part of the sequence (dim 1 of what has three dims or more): reduce_scatter and all_gather in place of
            all_reduce, and norms, dropout and residual sums on a part of the activations (Korthikanti et al. 2022,
            arXiv:2205.05198). Keras on torch only.
        per_tensor_rows: see DataParallel.
        remat, experts, shard_axis, offload: see DataParallel.
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
        expert_axis: str | Axes | None = None,
        attention: Attention = "auto",
        sequence_parallel: bool = False,
        exact_random: bool = False,
        per_tensor_rows: bool = False,
        remat: Remat = "none",
        experts: Experts = "all",
        shard_axis: str | Axes | None = None,
        offload: Offload = "none",
    ) -> None:
        if isinstance(layout_map, str):
            grid = _mesh_or_all(mesh, "model")
        else:
            grid = as_mesh(mesh) if mesh is not None else mesh_of_map(layout_map)
        context, expert = named_axes(grid, context_axis, CONTEXT), named_axes(grid, expert_axis, EXPERT)
        more = contexts(context, attention, sequence_parallel) | for_experts(expert)
        more |= options(
            auto_shard_dataset=auto_shard_dataset,
            zero=zero,
            shard_axis=shard_axis,
            sequence_parallel=sequence_parallel,
            exact_random=exact_random,
            per_tensor_rows=per_tensor_rows,
            remat=remat,
            experts=experts,
            offload=offload,
        )
        if isinstance(layout_map, str):
            self._find(layout_map, grid, data_axis, model_axis, more)
            return
        rules = as_layout_map(layout_map, grid)
        if rules.mesh != grid:
            raise LayoutError(f"the layout map is for {rules.mesh}, the strategy for {grid}: use one mesh")
        data, _ = choose_axes(grid, data_axis, model_axis, context, expert)
        strategy = Strategy(grid, data, layouts_of(rules), **more)
        super().__init__(strategy, rules)

    def _find(self, how: str, mesh: Mesh, data_axis: Any, model_axis: Any, more: dict[str, Any]) -> None:
        if how != "auto":
            raise LayoutError(f"layout_map={how!r}: give a LayoutMap, or 'auto' to have the layouts found")
        data, self.model_axes = choose_axes(mesh, data_axis, model_axis, more["context_axes"], more["expert_axes"])
        self.found = FoundLayouts(mesh, self.model_axes)
        strategy = Strategy(mesh, data, self.found.layout_for, **more)
        super().__init__(strategy, self.found.layout_map)


def _mesh_or_all(mesh: Any, axis: str) -> Mesh:
    return Mesh({axis: len(session.list_devices())}) if mesh is None else as_mesh(mesh)

"""plan: how a Keras model is laid out on a mesh, before anything is placed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from unidist import log
from unidist.algebra import Axes, Layout, Mesh
from unidist.array import as_mesh
from unidist.errors import LayoutError
from unidist.keras import driver as drivers
from unidist.keras import recomputing, seeds
from unidist.keras.patching.compat import is_float_dtype, tree
from unidist.keras.planning import samples
from unidist.keras.planning.facts import ended, read
from unidist.keras.planning.valueless import let_go
from unidist.keras.recomputing import Remat
from unidist.keras.records.layer_report import in_words
from unidist.keras.strategies.layout_maps import as_layout_map
from unidist.keras.strategies.options import (
    Attention,
    Experts,
    Offload,
    contexts,
    dispatches,
    for_experts,
    offloads,
    shards,
    takes_uneven,
)
from unidist.planner.holding import Rehearsed
from unidist.planner.layout_map import LayoutMap
from unidist.planner.plan import Plan, Rehearse, make_plan, to_follow
from unidist.strategies import Strategy
from unidist.strategies.strategy import CONTEXT, EXPERT, choose_axes, named_axes


def plan(
    model: Any,
    mesh: Any,
    layout_map: Any = "auto",
    *,
    data_axis: str | Axes | None = None,
    model_axis: str | Axes | None = None,
    zero: int = 0,
    inputs: Any = None,
    batch: int | None = None,
    sequence: int = 128,
    sequence_parallel: bool = False,
    context_axis: str | Axes | None = None,
    expert_axis: str | Axes | None = None,
    attention: Attention = "auto",
    shard_axis: str | Axes | None = None,
    offload: Offload = "none",
    experts: Experts = "all",
    remat: Remat = "none",
) -> Plan:
    """Plans a model's layouts on a mesh, with reasons, bytes and the traffic of a step.

    Nothing is placed or sent, and no device is needed. The model may have been built without values, inside of
    `keras.StatelessScope(initialize_variables=False)`. Keras gives it values as soon as any model is fitted while it is
    alive: delete it once it is planned, or call `keras.utils.clear_session()`.

    Args:
        model: a built Keras model.
        mesh: a Mesh or Keras DeviceMesh.
        layout_map: "auto": the layouts are found by running the model on a few small rows, with random numbers for the
            outputs of its Dense, EinsumDense, Embedding and convolution layers, and watching where a change of one
            slice of them arrives. Else a LayoutMap of unidist or of Keras, or a mapping of rules.
        data_axis, model_axis, zero, shard_axis: see ModelParallel.
        inputs: how the model is called, where it does not say itself: arrays or KerasTensors.
        batch: rows of a global batch, for the traffic; None: 8 for each place of the data axes.
        sequence: length of open dims, for the traffic.
        sequence_parallel: the traffic is that of ModelParallel(..., sequence_parallel=True), on torch. Layouts are the
            same.
        context_axis, expert_axis, attention: see ModelParallel. On JAX the sums of gradients are counted, not what
            attention reads of other devices' places.
        remat: see DataParallel. Beside what is kept, one layer is counted that is computed again.
        experts: see DataParallel. How many rows "dispatch" sends depends on what gates choose: counted are those of
            gates that choose each kernel as often.
        offload: see DataParallel.

    Raises:
        LayoutError: the model is not built or cannot be run; rules that do not fit, all together.
        CapabilityError: Keras's backend cuts no sequences, or has not this choice of attention.

    Example:
        >>> import keras, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(8)])
        >>> found = unidist.plan(model, unidist.Mesh({"model": 2}))
        >>> found.bytes_per_device
        576
    """
    grid = as_mesh(mesh)
    context, expert = named_axes(grid, context_axis, CONTEXT), named_axes(grid, expert_axis, EXPERT)
    cutting = contexts(context, attention, sequence_parallel) | for_experts(expert)
    data, axes = choose_axes(grid, data_axis, model_axis, context, expert)
    rules = None if _is_auto(layout_map) else as_layout_map(layout_map, grid)
    if rules is not None and rules.mesh != grid:
        raise LayoutError(f"the layout map is for {rules.mesh}, the plan for {grid}: use one mesh")
    rows = batch if batch is not None else 8 * _places(grid, data)
    cutting |= {**shards(zero, shard_axis), "uneven": takes_uneven(), "sequence_parallel": sequence_parallel}
    cutting |= offloads(offload) | dispatches(experts)
    recomputing.check(remat)
    strategy = Strategy(grid, data, **cutting, remat=remat)
    rehearse = _rehearsal(model, inputs, strategy, rows, sequence)
    return _made(model, strategy, axes, rules, inputs, rows, sequence, rehearse)


def layouts_of(model: Any, strategy: Strategy, axes: Axes) -> Plan:
    """Plans a model's layouts alone: what a step sends and keeps is not looked at."""
    return _made(model, strategy, axes, None, None, 1, 1, None)


def _made(
    model: Any,
    strategy: Strategy,
    axes: Axes,
    rules: LayoutMap | None,
    inputs: Any,
    batch: int,
    sequence: int,
    rehearse: Rehearse | None,
) -> Plan:
    mesh = strategy.mesh
    axes = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    follow = functools.partial(to_follow, mesh=mesh, axes=axes) if rules is None else ended
    with log.while_long(f"planning model {model.name!r}"), seeds.untouched(), _one_thread():
        weighs = strategy.experts == "dispatch" and keras.config.backend() == "torch" and rehearse is not None
        keeps = rehearse is not None
        again = recomputing.chosen(model, strategy.remat) if keeps else ()
        facts = read(model, _places(mesh, axes), inputs, follow, keeps=keeps, weighs=weighs, again=again)
        how = rehearse or (lambda *asked: "layouts alone were asked for")
        lengths = _lengths(model, inputs, strategy, sequence) if rehearse is not None else frozenset()
        made = make_plan(facts, strategy, axes, rules, batch=batch, sequence=sequence, rehearse=how, lengths=lengths)
    let_go(model)
    return made


def _rehearsal(model: Any, inputs: Any, strategy: Strategy, batch: int, sequence: int) -> Rehearse:
    def rehearse(layouts: list[Layout], shared: dict[str, Axes], chosen: dict[str, float]) -> Rehearsed | str:
        driver = drivers.current()
        if driver is None:
            return f"no driver trains with Keras on {keras.config.backend()}"
        sample = samples.sample(model, inputs, samples.ROWS, sequence)
        try:
            with recomputing.marking(recomputing.chosen(model, strategy.remat)):
                return driver.rehearse(model, layouts, strategy, sample, batch, shared, chosen)
        except Exception as error:
            # Whatever a model may raise that asks tensors for values, which a rehearsal has not.
            return f"the model cannot be called without values ({type(error).__name__}: {in_words(error)})"

    return rehearse


def _lengths(model: Any, inputs: Any, strategy: Strategy, sequence: int) -> frozenset[int]:
    """Returns the lengths of the sequences that context axes cut."""
    if not strategy.context_axes:
        return frozenset()
    given = tree.flatten(samples.sample(model, inputs, samples.ROWS, sequence))
    dtypes = [keras.backend.standardize_dtype(x.dtype) for x in given]
    cut = (strategy.cuts_places(tuple(x.shape), is_float_dtype(t)) for x, t in zip(given, dtypes, strict=True))
    return frozenset(int(x.shape[1]) for x, is_cut in zip(given, cut, strict=True) if is_cut)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors of two rows are small: torch's threads would wait for each other longer than they work."""
    if keras.config.backend() != "torch":
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_auto(layout_map: Any) -> bool:
    if isinstance(layout_map, str):
        if layout_map != "auto":
            raise LayoutError(f"layout_map={layout_map!r}: give a LayoutMap, or 'auto' to have it found")
        return True
    return False


def _places(mesh: Mesh, axes: Axes) -> int:
    return mesh.axis_size(axes) if axes else 1

"""Rehearsal: a step of one rank on tensors without values, by the rules that a step goes by.

It would send what a step sends, on any mesh, with no other device.

Only layers are rehearsed. Gradients are summed and stored values are fetched by closed forms (planner/predicting.py).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch

from unidist.algebra import Axes, Layout, Sharding
from unidist.backends.torch.rehearsing import RehearsingRank
from unidist.backends.torch.sharded.masks import Masks
from unidist.backends.torch.sharded.nested import innermost
from unidist.backends.torch.sharded.tensor import plain
from unidist.keras.layer_facts import is_container, operations_of
from unidist.keras.patching.compat import is_float_dtype, to_torch_dtype, torch_random, tree
from unidist.keras.patching.layer_calls import bare
from unidist.keras.planning.saved_tensors import without_values
from unidist.keras.recomputing import computes_all_again
from unidist.keras.torch import borders, carrying, features
from unidist.keras.torch.context import entered
from unidist.keras.torch.cutting import rows_of
from unidist.keras.torch.layers import applying, contexts, rules, sequence
from unidist.keras.torch.params.storage import Shardings, Storage
from unidist.keras.torch.params.variables import DistributedVariable
from unidist.keras.torch.world import RankWorld
from unidist.ledger import Ledger
from unidist.planner.holding import Rehearsed
from unidist.strategies import Strategy


class Kept:
    """Counts the tensors that torch keeps of a call, of one rank.

    Args:
        weights: they are there anyway, and do not count.

    Attributes:
        bytes: of all that was kept so far.
        masks: to be those of the space in which sequences are cut.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.bytes = 0
        self.masks: Masks = _MasksWithoutValues(self)
        # The memory itself: an address is another's as soon as its own is gone.
        self._known = {_address(x): x.untyped_storage() for x in weights}

    def watching(self) -> AbstractContextManager[Any]:
        """Inside, what is kept is counted."""
        return torch.autograd.graph.saved_tensors_hooks(self.note, lambda x: x)

    def note(self, x: torch.Tensor) -> torch.Tensor:
        if _address(x) not in self._known:
            self._known[_address(x)] = x.untyped_storage()
            self.bytes += x.untyped_storage().nbytes()
        return x


class _MasksWithoutValues(Masks):
    """Counts what attention keeps where it is one operation, as on devices that have values.

    Without values torch computes it step by step, and keeps a number for each pair of places. Masks of one shape are
    taken for one mask, of two values.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept
        self._seen: set[torch.Size] = set()

    def keeping(self, mask: torch.Tensor | None, *operands: torch.Tensor) -> AbstractContextManager[Any]:
        if mask is not None and mask.requires_grad:
            return contextlib.nullcontext()
        queries, keys, values = map(innermost, operands)
        for x in (queries, keys, values):
            self._kept.note(x)
        # What it gives, and the logarithm of each sum, in float32.
        rows = queries.numel() // queries.shape[-1]
        self._kept.bytes += rows * (values.shape[-1] * values.itemsize + 4)
        if mask is not None and (shape := innermost(mask).shape) not in self._seen:
            self._seen.add(shape)
            self._kept.bytes += shape.numel()
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _address(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


_MARKS = (borders.BORDER, borders.INWARD)


def rehearse(
    model: Any,
    layouts: Sequence[Layout],
    strategy: Strategy,
    sample: Any,
    batch: int,
    shared: Mapping[str, Axes],
    chosen: Mapping[str, float],
) -> Rehearsed:
    """Returns what a model's layers send, and keep of parts of sequences, in the first rank's step.

    Args:
        model: a built model. Its variables need no values, and are as before afterwards.
        layouts: of each of the model's variables, as layers see them.
        sample: some rows in the structure that the model takes: shapes and dtypes count alone.
        batch: how many rows there are over all data shards.
        strategy: the mesh, the data axes, and whether sequences are cut.
        shared: path of a layer -> axes of the ranks that work with all that it gives.
        chosen: path of a layer with stacked kernels -> for how many of these a row has a weight.

    Raises:
        Exception: whatever a model raises that asks for values.
    """
    mesh, data_axes = strategy.mesh, strategy.data_axes
    backend = RehearsingRank(mesh)
    world = RankWorld(mesh, backend, data_axes)
    with contextlib.ExitStack() as stack:
        for one in _called(model):
            stack.enter_context(_as_it_was(one))
            stack.enter_context(bare(one))
        variables = list({id(v): v for v in model.variables}.values())
        for variable, layout in zip(variables, layouts, strict=True):
            stack.enter_context(_placed(variable, Sharding(mesh, layout, tuple(variable.shape)), world))
        _give_rules(model, world, shared, chosen, strategy)
        stack.enter_context(_without_drawing())
        stack.enter_context(without_values())
        frame = world.frame_for(world.ranks[0])
        frame.rows = rows_of(world, frame.rank, batch)
        given = tree.map_structure(functools.partial(_without, frame.rows.local), sample)
        kept = None
        if strategy.in_parts:
            leaves = [v._storage.leaf(frame.rank) for v in model.trainable_variables if _is_late(v, strategy)]
            frame.shared = sequence.SharedWeights(frame, leaves)
        if strategy.context_axes:
            kept = Kept(p for v in model.variables for p in v._storage.parameters())
            features.space_over(frame, strategy.context_axes).masks = kept.masks
        with entered(frame), carrying.step(frame, given) if world.cuts_rows else contextlib.nullcontext(given) as own:
            _step(model, own, strategy.context_axes, kept)
    # What is kept where backward computes again is no tensor that autograd saves.
    is_seen = kept is not None and not any(map(computes_all_again, model._flatten_layers()))
    return Rehearsed(Ledger(backend.sent), kept.bytes if kept is not None and is_seen else None)


def _step(model: Any, given: Any, cutting: Axes, kept: Kept | None) -> None:
    kwargs = {"training": True} if model._call_has_training_arg else {}
    with torch.enable_grad():
        watching = contextlib.nullcontext() if kept is None else kept.watching()
        with keras.StatelessScope(collect_losses=True, initialize_variables=False) as scope, watching:
            out = model(given, **kwargs)
        penalties = [v.regularizer(v) for v in model.trainable_variables if v.regularizer is not None]
        losses = [_as_losses_take_it(x, cutting) for x in tree.flatten((out, scope.losses, penalties))]
        with_gradient = [x.sum() for x in losses if isinstance(x, torch.Tensor) and x.requires_grad]
        if with_gradient:
            functools.reduce(operator.add, with_gradient).backward()


def _as_losses_take_it(x: Any, cutting: Axes) -> Any:
    """Returns a tensor with all features, and this rank's places where `cutting` axes cut them.

    Losses add these up.
    """
    if not features.is_cut(x) or not set(features.axes_of(x)) & set(cutting):
        return features.whole(x)
    of_places = x if x.spec.space.invariant else x.local
    return plain(of_places.local)


def _is_late(variable: Any, strategy: Strategy) -> bool:
    """Returns whether a variable's gradients of parts of sequences wait for the end of backward."""
    layout = variable._storage.sharding.layout
    three = strategy.with_rule(layout).variable(variable.path, tuple(variable.shape))
    is_kept = three.storage == layout
    return is_kept and (variable._storage.is_whole or strategy.in_parts == "all")


def _called(model: Any) -> list[Any]:
    layers = model._flatten_layers()
    operations = (one for layer in layers if is_container(layer) for one in operations_of(layer))
    return list({id(one): one for one in (*layers, *operations)}.values())


def _without(rows: int, x: Any) -> torch.Tensor:
    return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta")


def _give_rules(
    model: Any, world: RankWorld, shared: Mapping[str, Axes], chosen: Mapping[str, float], strategy: Strategy
) -> None:
    for layer in model._flatten_layers():
        rule = rules.make_rule(layer)
        if rule is not None:
            rule.in_parts = strategy.sequence_parallel
            rule.chosen = chosen.get(layer.path)
            applying.install_rule(rule)
        if axes := shared.get(layer.path):
            applying.install_share(layer, axes)
    if strategy.context_axes:
        contexts.give(model, strategy)
    else:
        sequence.give_whole(model)
    if world.cuts_rows:
        borders.give(model, exact=False)


@contextlib.contextmanager
def _as_it_was(one: Any) -> Iterator[None]:
    """Inside a layer has no marks of a training; behind, those that it had."""
    before = {name: vars(one).pop(name) for name in _MARKS if name in vars(one)}
    spec = getattr(one, "input_spec", None)
    try:
        yield
    finally:
        for name in _MARKS:
            vars(one).pop(name, None)
        vars(one).update(before)
        if spec is not None:
            one.input_spec = spec


@contextlib.contextmanager
def _placed(variable: Any, sharding: Sharding, world: RankWorld) -> Iterator[None]:
    """Inside a variable is laid out, and has no values."""
    held, rank = Storage(world, Shardings.alike(sharding), variable.path), world.ranks[0]
    part = torch.empty(sharding.local_shape(rank), dtype=to_torch_dtype(variable.dtype), device="meta")
    learns = variable.trainable and is_float_dtype(variable.dtype)
    held.keep(torch.nn.Parameter(part, requires_grad=learns))
    before, kind = dict(vars(variable)), type(variable)
    vars(variable).pop("_value", None)
    variable.__class__ = DistributedVariable
    variable._storage = held
    try:
        yield
    finally:
        vars(variable).clear()
        vars(variable).update(before)
        variable.__class__ = kind


@contextlib.contextmanager
def _without_drawing() -> Iterator[None]:
    """Inside Keras draws by no generator, which torch's meta device has not."""
    draw = torch_random.torch_seed_generator
    torch_random.torch_seed_generator = lambda seed: None
    try:
        yield
    finally:
        torch_random.torch_seed_generator = draw

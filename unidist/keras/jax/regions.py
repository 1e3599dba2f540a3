"""Calls layers that treat rows alone on each data shard's own rows, so that ZeRO names collectives.

They are all_gather of values, reduce_scatter of gradients.

A call becomes a shard_map over the data axes. Between such calls arrays are global, so whatever mixes rows (batch
statistics, losses, metrics, random numbers) computes on all of them, as on one device. Which calls treat rows alone is
proven from the program of each (rowwise.py); the others are left to the compiler, which reduces whole gradients where
it has no reduce_scatter.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import PartitionSpec
from keras import StatelessScope
from keras.layers import RNN, Wrapper

from unidist.keras.jax import layouts, rowwise, zero_collectives
from unidist.keras.patching.compat import get_keras_mask, get_stateless_scope, set_keras_mask
from unidist.keras.patching.patches import calling

_active = threading.local()
# Cheap to have again from gathered values, which are not to be kept for backward in any form.
_NOT_KEPT = frozenset(["all_gather", "convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze"])


class Region:
    """The variables of one call of a model that the data axes cut, and their values in it.

    Args:
        cuts: how each is cut, by the variable's id.
        values: their values, where they rest.
    """

    def __init__(self, cuts: dict[int, zero_collectives.Cut], values: dict[int, Any]) -> None:
        self.cuts = cuts
        self._held: dict[int, Any] | None = None
        # Once a step, so that a variable's gradient is reduced once however often it is used.
        self.values = {
            key: values[key] if cut.stored else zero_collectives.stacked(cut, values[key]) for key, cut in cuts.items()
        }

    def begin(self) -> None:
        """To be called before the first layer's call: notes what variables hold in the model's."""
        if self._held is None:
            self._held = dict(get_stateless_scope().state_mapping)

    def was_written(self, layer: Any) -> bool:
        """Returns whether the call has assigned to a variable of a layer: what the region holds of it is old."""
        scope, held = get_stateless_scope(), self._held or {}
        own = [variable for variable in layer.variables if id(variable) in self.cuts]
        return any(scope.get_current_value(variable) is not held.get(id(variable)) for variable in own)


@contextlib.contextmanager
def entering(region: Region | None) -> Iterator[None]:
    before, _active.region = getattr(_active, "region", None), region
    try:
        yield
    finally:
        _active.region = before


@calling
def calling_layer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Operation.__call__: of a layer whose own variables the data axes cut, on each data shard's rows."""
    region = getattr(_active, "region", None)
    if region is not None:
        region.begin()
    if region is None or not any(id(v) in region.cuts for v in _of_unit(self)):
        return original(self, *args, **kwargs)
    call = LayerCall.of(self, functools.partial(original, self), args, kwargs)
    if call is not None and not region.was_written(self) and (program := call.proven()) is not None:
        return call.on_shards(region, program)
    # No collectives inside of a loop over time.
    with entering(None if isinstance(self, RNN) else region):
        return original(self, *args, **kwargs)


def _of_unit(layer: Any) -> list[Any]:
    """Returns the variables of a layer called as one: its own, and all if it calls another's `call`."""
    if isinstance(layer, (RNN, Wrapper)):
        return list(layer.trainable_variables)
    return list(getattr(layer, "_trainable_variables", ()))


def forget_losses(layer: Any, losses: Iterable[Any] | None = None) -> None:
    """To be called once the losses that layers added in a trace were read.

    Keras finds them by `id`, and keeps the ids until each layer is called again. By then another layer's loss may have
    such an id: Keras would count it twice, or drop it (3.15, 3.16).

    Args:
        losses: those to forget; None: all.
    """
    gone = None if losses is None else {id(loss) for loss in losses}
    for part in layer._flatten_layers():
        part._loss_ids.difference_update(part._loss_ids if gone is None else gone)


class _UnprovenError(Exception):
    """The call does more than to give outputs."""


class _Scope(StatelessScope):  # type: ignore[misc]
    """A stateless scope that shows what an outer one holds of other variables."""

    def __init__(self, variables: list[Any], values: Any) -> None:
        super().__init__(collect_losses=True)
        # As they are: Keras would cast them to the dtype of computation of the layer, and layers in it may have others.
        self._given = {id(variable): value for variable, value in zip(variables, values, strict=True)}
        self.state_mapping.update(self._given)
        self._outer = get_stateless_scope()

    def get_current_value(self, variable: Any) -> Any:
        found = super().get_current_value(variable)
        return self._outer.get_current_value(variable) if found is None else found

    @property
    def is_untouched(self) -> bool:
        same = self.state_mapping.keys() == self._given.keys()
        return same and not self.losses and all(self.state_mapping[k] is v for k, v in self._given.items())


@dataclass(frozen=True)
class LayerCall:
    """A layer's call, its arrays apart from all else that it is given.

    Attributes:
        layer: is called.
        function: takes the call's arguments.
        variables: all of the layer.
        leaves, tree: the arguments.
        arrays: which leaves are arrays.
        has_rows: which of these have rows.
    """

    layer: Any
    function: Callable[..., Any]
    variables: list[Any]
    leaves: list[Any]
    tree: Any
    arrays: list[int]
    has_rows: list[bool]

    @classmethod
    def of(cls, layer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> LayerCall | None:
        """None where it takes no rows, or numbers besides whose gradient no shard has whole."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        rows = next((leaves[place].shape[0] for place in arrays if leaves[place].ndim), None)
        has_rows = [leaves[place].ndim > 0 and leaves[place].shape[0] == rows for place in arrays]
        others = (leaves[place] for place, own in zip(arrays, has_rows, strict=True) if not own)
        if rows is None or any(jnp.issubdtype(other.dtype, jnp.inexact) for other in others):
            return None
        return cls(layer, function, layer.variables, leaves, tree, arrays, has_rows)

    @property
    def rows(self) -> int:
        place = self.arrays[self.has_rows.index(True)]
        return int(self.leaves[place].shape[0])

    def run(self, values: Any, arrays: Any) -> tuple[list[Any], list[Any], Any]:
        """(outputs, their masks, the outputs' tree) of the layer with these values, on these arrays.

        Raises:
            _UnprovenError: it changed a variable or added a loss.
        """
        leaves = list(self.leaves)
        for place, array in zip(self.arrays, arrays, strict=True):
            leaves[place] = array
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        with entering(None), _Scope(self.variables, values) as scope:
            try:
                outputs, tree = jax.tree.flatten(self.function(*args, **kwargs))
            finally:
                forget_losses(self.layer, scope.losses)
        if not scope.is_untouched or not all(isinstance(output, jax.Array) for output in outputs):
            raise _UnprovenError
        return outputs, [get_keras_mask(output) for output in outputs], tree

    def proven(self) -> Any:
        """Returns its program, where each row of its outputs is proven to be made of that input row alone.

        Else None.
        """
        try:
            programs = [jax.make_jaxpr(self._traced)(*self._abstract(rows)) for rows in rowwise.SIZES]
        except Exception:
            # Whatever it has against other numbers of rows than its own. The call itself raises what it has to raise.
            return None
        return programs[0] if rowwise.is_row_wise(programs[0], programs[1]) else None

    def _traced(self, values: Any, arrays: Any) -> Any:
        outputs, masks, _ = self.run(values, arrays)
        return outputs, masks

    def _abstract(self, rows: int) -> tuple[list[Any], list[Any]]:
        values = [jax.ShapeDtypeStruct(tuple(v.shape), v._dtype) for v in self.variables]
        arrays = [jax.typeof(self.leaves[place]) for place in self.arrays]
        return values, [
            jax.ShapeDtypeStruct((rows, *a.shape[1:]) if own else a.shape, a.dtype, weak_type=a.weak_type)
            for a, own in zip(arrays, self.has_rows, strict=True)
        ]

    def on_shards(self, region: Region, program: Any) -> Any:
        """The call, which is proven, as a program of each data shard on its rows."""
        cuts = [region.cuts.get(id(variable)) for variable in self.variables]
        cut = next(found for found in cuts if found is not None)
        values = [_given(variable, own, region) for variable, own in zip(self.variables, cuts, strict=True)]
        shards, rows = layouts.places(cut.mesh, cut.rows), PartitionSpec(cut.rows)
        arrays = [
            _padded(self.leaves[place], -self.rows % shards) if own else self.leaves[place]
            for place, own in zip(self.arrays, self.has_rows, strict=True)
        ]
        dtypes, trees = _lows(program, len(self.variables)), []

        def local(values: Any, arrays: Any) -> Any:
            whole = [_whole(own, value, dtype) for own, value, dtype in zip(cuts, values, dtypes, strict=True)]
            outputs, masks, tree = self.run(whole, arrays)
            trees.append(tree)
            return outputs, masks

        if any(own is not None and own.stored for own in cuts):
            local = jax.checkpoint(local, policy=_is_kept)
        takes = [_spec(own) for own in cuts], [rows if own else PartitionSpec() for own in self.has_rows]
        mapped = zero_collectives.by_shard(cut, local, takes, rows)
        outputs, masks = jax.tree.map(lambda array: array[: self.rows], mapped(values, arrays))
        for output, mask in zip(outputs, masks, strict=True):
            if mask is not None:
                set_keras_mask(output, mask)
        return jax.tree.unflatten(trees[-1], outputs)


def _lows(program: Any, count: int) -> list[Any]:
    """Returns the dtype of fewer bits in which each of a program's first arguments is used.

    It is one where all that is done with the argument is one cast. Gradients of several uses, or of steps of a loop,
    would be added in that dtype.
    """
    uses: dict[Any, list[Any]] = {variable: [] for variable in program.jaxpr.invars[:count]}
    for equation in program.jaxpr.eqns:
        for variable in equation.invars:
            if not isinstance(variable, Literal) and variable in uses:
                uses[variable].append(equation)
    return [_low(variable.aval.dtype, found) for variable, found in uses.items()]


def _low(own: Any, uses: list[Any]) -> Any:
    if len(uses) != 1 or uses[0].primitive.name != "convert_element_type":
        return None
    dtype = uses[0].params["new_dtype"]
    both_float = jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
    return dtype if both_float and dtype.itemsize < own.itemsize else None


def _given(variable: Any, cut: zero_collectives.Cut | None, region: Region) -> Any:
    """Returns what the shards are given of a variable: their parts, their places of the stack, or all."""
    if cut is not None:
        value = region.values[id(variable)]
        return cut.laid(value) if cut.stored else value
    found = get_stateless_scope().get_current_value(variable)
    return variable._value if found is None else found


def _spec(cut: zero_collectives.Cut | None) -> PartitionSpec:
    if cut is None:
        return PartitionSpec()
    return cut.spec if cut.stored else PartitionSpec(cut.rows)


def _whole(cut: zero_collectives.Cut | None, value: Any, dtype: str | None) -> Any:
    """Makes a variable whole of what a shard holds of it; what is gathered is in this dtype."""
    if cut is None:
        return value
    return zero_collectives.gathered(cut, value, dtype) if cut.stored else value[0]


def _padded(array: Any, missing: int) -> Any:
    """Pads an array with its last row: of zeros a layer might make NaN. No gradient comes back of it."""
    if not missing:
        return array
    return jnp.concatenate([array, jnp.repeat(array[-1:], missing, axis=0)])


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    inside = getattr(params.get("call_jaxpr"), "eqns", ())  # of a function whose derivative is given
    return primitive.name not in _NOT_KEPT and all(e.primitive.name != "all_gather" for e in inside)

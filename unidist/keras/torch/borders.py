"""Borders: where a layer computes natively, with this shard's rows, and where native rows are carried.

Layers of Keras that treat each row alone need no carriers: they take their rows off, and put the layout on what they
give. A model whose call is one program, or holds parts of sequences, has its border at that call. Amid such native rows
what may look at several rows is on carriers in turn.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from unidist import events
from unidist.backends.torch.sharded import ShardedTensor, Space, wrap
from unidist.backends.torch.sharded.nested import replaced
from unidist.backends.torch.sharded.tensor import moved
from unidist.keras import numbers
from unidist.keras.layer_facts import is_container, is_known, operations_of, overwritten
from unidist.keras.needs import draws
from unidist.keras.patching.compat import get_keras_mask, set_keras_mask
from unidist.keras.patching.layer_calls import Call, Stage
from unidist.keras.torch import features
from unidist.keras.torch.carrying import space_at, summand, wrapped
from unidist.keras.torch.context import Frame, Rows, around_call, infers_shapes
from unidist.keras.torch.layers.rules import is_sharded
from unidist.keras.torch.structures import mapped
from unidist.propagation.layouts import Cut

# On a layer: its border, or None.
BORDER = "_unidist_border"
# On what may look at several rows: its Inward.
INWARD = "_unidist_inward"
# On a tensor: it has no rows, whatever its first dim.
_ROWLESS = "_unidist_rowless"


def give(model: Any, exact: bool) -> list[Inward]:
    """Lets what is known to treat each row alone compute natively, and anything else on carriers.

    Args:
        exact: layers draw random numbers for the whole batch.

    Returns:
        What may look at several rows. Amid native rows it is on carriers in turn.
    """
    layers = model._flatten_layers()
    own = [layer for layer in layers if not is_container(layer) and not _treats_each_alone(layer, exact)]
    own += [operation for layer in layers if is_container(layer) for operation in operations_of(layer)]
    others = {id(one) for one in own}
    for layer in layers:
        inner = tuple(layer._flatten_layers())
        looked_at = inner if is_container(layer) else (layer,)
        operations = [operation for one in looked_at if is_container(one) for operation in operations_of(one)]
        is_alone = others.isdisjoint(map(id, (*looked_at, *operations)))
        _set_border(layer, inner, is_alone)
    return [_inward_border(one) for one in own]


def _treats_each_alone(layer: Any, exact: bool) -> bool:
    return is_known(layer) and not (exact and draws(layer))


class _Outward:
    """A layer's border. No list or dict is put on a layer: Keras saves what those hold.

    Attributes:
        losers: the layers that may add losses in the call.
        inner: the layers inside of one whose call would be right on carriers too.
    """

    def __init__(self, layer: Any) -> None:
        self.losers: tuple[Any, ...] = ()
        self.inner: tuple[Any, ...] = ()
        self.take_off = around_call(layer, Stage.BORDER, self)

    def __call__(self, here: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        # A hook of the user's own, which may have come since, may look at several rows.
        if any(one._forward_hooks or one._forward_pre_hooks for one in self.inner):
            return rest(*args, **kwargs)
        return _outward(self.losers, here, rest, args, kwargs)


def _set_border(layer: Any, inner: tuple[Any, ...], is_alone: bool) -> None:
    known: _Outward | None = vars(layer).get(BORDER)
    if is_alone:
        known = known or _Outward(layer)
        known.losers, known.inner = inner, inner[1:]
    elif known is not None:
        known.take_off()
        known = None
    object.__setattr__(layer, BORDER, known)


def _outward(losers: tuple[Any, ...], here: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
    """A call with this shard's rows of what carries them; `losers`: what may add losses in it."""
    if here.carried is None:
        return rest(*args, **kwargs)
    tensors: list[Any] = []
    mapped(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) and x.ndim else None, (args, kwargs))
    cut = next((x for x in tensors if features.carries_rows(x) and _has_rows(x)), None)
    if cut is None or not all(_goes_with(x, cut) for x in tensors):
        return rest(*args, **kwargs)
    state: Any = cut.spec.states[0]
    rows = Rows(state.sizes[here.world.data_place(here.rank)], state.sizes)
    known: dict[int, torch.Tensor] = {}

    def local(x: ShardedTensor) -> torch.Tensor:
        if id(x) not in known:
            known[id(x)] = _in_rows(x, state)
            # Not by this function: a function that holds itself holds `known` until Python looks for cycles.
            if (mask := get_keras_mask(x)) is not None:
                set_keras_mask(known[id(x)], _in_rows(mask, state))
        return known[id(x)]

    given = replaced((args, kwargs), ShardedTensor, lambda x: local(x) if features.carries_rows(x) else x)
    with here.having_rows(rows), _added(losers, here, rows):
        out = rest(*given[0], **given[1])
    for x in tensors:  # a mask that the call takes off is off: attention does so
        if id(x) in known and get_keras_mask(known[id(x)]) is None:
            set_keras_mask(x, None)
    return mapped(lambda x: wrapped(here, rows, x) if _is_of(rows.local, x) else x, out)


def _in_rows(x: ShardedTensor, state: Any) -> torch.Tensor:
    return x.local if x.spec.states[0] == state else x.whole()


def _has_rows(x: ShardedTensor) -> bool:
    state = x.spec.states[0]
    return isinstance(state, Cut) and state.dim == 0


def _goes_with(x: Any, cut: ShardedTensor) -> bool:
    """Returns whether a tensor beside one with rows has the same ones, or none."""
    if x.shape[0] != cut.shape[0]:
        return not features.carries_rows(x) or bool(x.spec.whole)
    return features.carries_rows(x) and bool(x.spec.states[0] == cut.spec.states[0])


def _is_of(count: int, x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] == count


@contextlib.contextmanager
def _added(holders: tuple[Any, ...], here: Frame, rows: Rows) -> Iterator[None]:
    """Makes what is added to a model's losses inside a summand.

    It is a mean over this shard's rows, and counts by its share of them.
    """
    before = [len(one._losses) for one in holders]
    yield
    if here.carried is not None or here.rows is not rows:
        return
    for one, count in zip(holders, before, strict=True):
        found = list(one._losses)
        if len(found) > count:
            del one._losses[count:]
            one._losses.extend(_of_all(here, rows, loss) for loss in found[count:])


def _of_all(here: Frame, rows: Rows, loss: Any) -> Any:
    return loss if features.carries_rows(loss) else summand(here, numbers.by_share(features.whole(loss), rows.share))


class Inward:
    """Computes on carriers in a call of native rows, for what may look at several rows.

    Attributes:
        looks: whether it has looked at other shards' rows; None: it was not called yet.
    """

    def __init__(self, subject: Any) -> None:
        self.name: str = getattr(subject, "path", None) or subject.name
        self.looks: bool | None = None
        self._subject, self._constants = subject, _constants(subject)
        around_call(subject, Stage.REGION, self)

    @property
    def why(self) -> str:
        if self.looks is None:
            return "not called yet"
        if self.looks:
            return "given the rows of all shards: it looks at several"
        return "called with each shard's own rows: it treats each alone"

    def __call__(self, here: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        if here.carried is not None:
            places = space_at(here)
            before = places.moves
            with events.for_purpose(f"rows of {self.name}"), here.reading(self._rounded(places)):
                out = rest(*args, **kwargs)
            self.looks = bool(self.looks) or places.moves != before
            return out
        rows = here.rows
        if rows is None or not can_begin(here):
            return rest(*args, **kwargs)
        return on_carriers(here, rows, functools.partial(self, here, rest), args, kwargs, constants=self._constants)

    def _rounded(self, space: Space) -> dict[int, torch.Tensor]:
        """Returns id -> the bias of a layer in float8, as a carrier; nothing for others.

        Keras rounds that bias, and so its gradient: on carriers, the sum of all shards'. One that is cut the layer's
        rule carries.
        """
        bias = getattr(self._subject, "bias", None)
        if bias is None or not overwritten(self._subject) or is_sharded(bias):
            return {}
        return {id(bias): wrap(bias.value, space.whole(bias.value.shape))}


def _inward_border(subject: Any) -> Inward:
    known = vars(subject).get(INWARD)
    if known is None:
        known = Inward(subject)
        object.__setattr__(subject, INWARD, known)
    return known  # type: ignore[no-any-return]


def on_carriers(here: Frame, rows: Rows, call: Call, *given: Any, constants: frozenset[int] = frozenset()) -> Any:
    """Calls with the rows of all shards, amid native rows; `constants`: ids of what has none."""

    def enter(x: Any) -> Any:
        has_rows = _is_of(rows.local, x) and not getattr(x, _ROWLESS, False)
        is_other = isinstance(x, torch.nn.Parameter) or id(x) in constants
        return wrapped(here, rows, x) if has_rows and not is_other else x

    with here.carrying_rows(rows):
        out = call(*mapped(enter, given))
    return mapped(functools.partial(_left, here, rows), out)


def _left(here: Frame, rows: Rows, x: Any) -> Any:
    """Returns what leaves for a call of native rows."""
    if not features.carries_rows(x):
        return x
    state = Cut(0, rows.sizes)
    if x.ndim and x.shape[0] == rows.total and not x.spec.partial:
        local = moved(x, (state,), nested=True)
        if (mask := get_keras_mask(x)) is not None:
            set_keras_mask(local, _left(here, rows, mask))
        return local
    out = x.whole()
    setattr(out, _ROWLESS, True)
    return out


def _constants(subject: Any) -> frozenset[int]:
    """ids of the tensors that a graph of Keras's gives to each call."""
    found: list[Any] = []
    nodes = getattr(subject, "_inbound_nodes", ())
    mapped(found.append, [(node.arguments.args, node.arguments.kwargs) for node in nodes])
    return frozenset(id(x) for x in found if isinstance(x, torch.Tensor))


def can_begin(here: Frame) -> bool:
    return here.world.cuts_rows and not infers_shapes()

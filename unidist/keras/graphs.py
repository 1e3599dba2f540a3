"""Graphs: a model's run is kept call by call, and only what a change reaches is run again.

A Functional or Sequential model calls its layers and operations one by one, in an order of its own. Where none of them
is the user's code, a call gives the same for the same tensors and masks, and does nothing else: neither Python's state
nor a variable leads from one call to another (a run that writes variables is not kept). So of a run in which one layer
gives something else, the calls before it, and those that take what they took, need not be made: what they gave is kept.
Calls whose outputs have the bits that they had end the change there.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from unidist.keras.layer_facts import is_container, runs_only_keras
from unidist.keras.patching.compat import (
    Functional,
    get_keras_mask,
    get_stateless_scope,
    is_tensor,
    set_keras_mask,
    tree,
)

_RUN = "_run_through_graph"
_lock = threading.Lock()
_here = threading.local()
_users: dict[int, int] = {}


@dataclass(frozen=True, slots=True)
class Kept:
    """One call of a run: the masks of what it took and gave, and its losses.

    Layers take masks off and put them on.
    """

    taken_masks: tuple[Any, ...]
    outputs: tuple[Any, ...]
    masks: tuple[Any, ...]
    losses: tuple[Any, ...]


@dataclass
class Record:
    """A run of a graph, with nothing changed.

    Attributes:
        values: what was computed for each tensor of the graph, by its id.
        has_written: variables were written, or random numbers drawn.
    """

    values: dict[int, Any] = field(default_factory=dict)
    calls: list[Kept] = field(default_factory=list)
    has_written: bool = False


@dataclass
class Replay:
    """A run of what a change reaches.

    Attributes:
        called: the places of the calls that were made.
        is_ended: nothing more is to be called; what the model gives is of no use then.
    """

    called: set[int] = field(default_factory=set)
    has_written: bool = False
    is_ended: bool = False


def _alone(place: int, changed: bool) -> bool:
    return changed


class Graph:
    """The calls of a model's graph, in the order in which Keras makes them.

    A place is a number in this order.

    Attributes:
        inside: for each place the ids of the layers that work there.
    """

    def __init__(self, functional: Any) -> None:
        self._functional = functional
        self._nodes = list(_nodes_of(functional))
        self.inside = [frozenset(_layers_at(node.operation)) for node in self._nodes]
        self._takers: dict[int, list[int]] = {}
        for place, node in enumerate(self._nodes):
            for x in node.input_tensors:
                self._takers.setdefault(id(x), []).append(place)
        self._places: dict[int, list[int]] = {}
        for place, layers in enumerate(self.inside):
            for layer in layers:
                self._places.setdefault(layer, []).append(place)
        self._meets_shared = [False] * len(self._nodes)
        for place in reversed(range(len(self._nodes))):
            shared = any(len(self._places[layer]) > 1 for layer in self.inside[place])
            self._meets_shared[place] = shared or any(self._meets_shared[taker] for taker in self._behind(place))

    @classmethod
    def of(cls, model: Any) -> Graph | None:
        """Returns the graph of a model; None where a part of it cannot be run by itself.

        So it is with a model with a call of its own, or with code of the user's anywhere inside.
        """
        functional = model if isinstance(model, Functional) else getattr(model, "_functional", None)
        if not is_container(model) or not isinstance(functional, Functional) or keras.config.is_nnx_enabled():
            return None
        if not all(map(runs_only_keras, model._flatten_layers())):
            return None
        nodes = [node for inner in _functionals(model) for node in _nodes_of(inner)]
        # A node's arguments may be functions: of a loop, or of a map.
        given = (tree.flatten((node.arguments.args, node.arguments.kwargs)) for node in nodes)
        if not all(runs_only_keras(node.operation, more) for node, more in zip(nodes, given, strict=True)):
            return None
        return cls(functional)

    def place_of(self, layer: Any) -> int | None:
        """Returns where a layer works; None where it works at several places, or feeds a layer that does.

        The number of a call then says what is drawn or compared.
        """
        places = self._places.get(id(layer), [])
        return places[0] if len(places) == 1 and not self._meets_shared[places[0]] else None

    @contextlib.contextmanager
    def recording(self) -> Iterator[Record]:
        """The model's next call, in a stateless scope, is kept."""
        record = Record()
        with _standing(self._functional, functools.partial(self._record, record)):
            yield record

    @contextlib.contextmanager
    def replaying(self, record: Record, place: int, agreed: Callable[[int, bool], bool] = _alone) -> Iterator[Replay]:
        """In the model's next call, on what it took before, only what the layer at a place reaches is called.

        Args:
            agreed: asked at each place whether its outputs have changed, from whether they have here.
        """
        replay = Replay()
        with _standing(self._functional, functools.partial(self._replay, record, replay, place, agreed)):
            yield replay

    def is_whole(self, record: Record) -> bool:
        """Returns whether a run can be replayed: it made each call once, and wrote nothing."""
        return len(record.calls) == len(self._nodes) and not record.has_written

    def _behind(self, place: int) -> list[int]:
        return [taker for x in self._nodes[place].outputs for taker in self._takers.get(id(x), ())]

    def _record(self, record: Record, inputs: Any, operation_fn: Any) -> Any:
        scope, drawn = get_stateless_scope(), _drawn()
        record.values.update(zip(map(id, self._functional.inputs), tree.flatten(inputs), strict=False))

        def noting(operation: Any) -> Any:
            call = operation_fn(operation)

            def noted(*args: Any, **kwargs: Any) -> Any:
                node = self._nodes[len(record.calls)]
                masks = tuple(_mask(record.values[id(x)]) for x in node.input_tensors)
                begun = len(scope.losses)
                outputs = call(*args, **kwargs)
                given = tuple(tree.flatten(outputs))
                record.values.update(zip(map(id, node.outputs), given, strict=False))
                record.calls.append(Kept(masks, given, tuple(map(_mask, given)), tuple(scope.losses[begun:])))
                return outputs

            return noted

        outputs = getattr(type(self._functional), _RUN)(self._functional, inputs, operation_fn=noting)
        record.has_written = bool(scope.state_mapping) or drawn != _drawn()
        return outputs

    def _replay(
        self,
        record: Record,
        replay: Replay,
        place: int,
        agreed: Callable[[int, bool], bool],
        inputs: Any,
        operation_fn: Any,
    ) -> Any:
        scope, drawn = get_stateless_scope(), _drawn()
        begun = len(scope.losses)
        changed: dict[int, Any] = {}
        losses: dict[int, tuple[Any, ...]] = {}
        pending = [place]
        while pending and not replay.is_ended:
            place = heapq.heappop(pending)
            if place in replay.called:
                continue
            replay.called.add(place)
            before = len(scope.losses)
            given = self._called(record, changed, place, operation_fn)
            losses[place] = tuple(scope.losses[before:])
            if agreed(place, not are_kept(given, record.calls[place])):
                changed.update(zip(map(id, self._nodes[place].outputs), given, strict=False))
                for taker in self._behind(place):
                    heapq.heappush(pending, taker)
        # In the order of a whole run.
        scope.losses[begun:] = [loss for k, kept in enumerate(record.calls) for loss in losses.get(k, kept.losses)]
        replay.has_written = bool(scope.state_mapping) or drawn != _drawn()
        found = [changed.get(id(x), record.values[id(x)]) for x in self._functional.outputs]
        return tree.pack_sequence_as(self._functional._outputs_struct, found)

    def _called(self, record: Record, changed: dict[int, Any], place: int, operation_fn: Any) -> list[Any]:
        node = self._nodes[place]
        values = {}
        for x, mask in zip(node.input_tensors, record.calls[place].taken_masks, strict=True):
            values[id(x)] = changed.get(id(x), record.values[id(x)])
            if id(x) not in changed and is_tensor(values[id(x)]):
                set_keras_mask(values[id(x)], mask)
        args, kwargs = node.arguments.fill_in(values)
        return list(tree.flatten(operation_fn(node.operation)(*args, **kwargs)))


def _drawn() -> bytes:
    """Returns the state of the generators that dropout on torch draws from.

    Random numbers of elsewhere are variables' own.
    """
    if keras.config.backend() != "torch":
        return b""
    import torch

    devices = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return b"".join(state.numpy().tobytes() for state in devices)


def _nodes_of(functional: Any) -> Iterator[Any]:
    by_depth = functional._nodes_by_depth
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if node.operation and not node.is_input:
                yield node


def _functionals(model: Any) -> Iterator[Any]:
    for layer in model._flatten_layers():
        inner = layer if isinstance(layer, Functional) else getattr(layer, "_functional", None)
        if isinstance(inner, Functional):
            yield inner


def _layers_at(operation: Any) -> Iterator[int]:
    yield id(operation)
    if isinstance(operation, keras.layers.Layer):
        yield from map(id, operation._flatten_layers())


def _mask(value: Any) -> Any:
    return get_keras_mask(value) if is_tensor(value) else None


def are_kept(given: list[Any], kept: Kept) -> bool:
    """Returns whether outputs, and their masks, are those of a kept call."""
    if len(given) != len(kept.outputs):
        return False
    pairs = zip((*given, *map(_mask, given)), (*kept.outputs, *kept.masks), strict=True)
    return all(has_same_bits(a, b) for a, b in pairs)


def has_same_bits(a: Any, b: Any) -> bool:
    """Returns whether two tensors are equal in every bit, so that all that follows of them is too."""
    if a is b:
        return True
    if not is_tensor(a) or not is_tensor(b) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(np.array_equal(*(_bits(keras.ops.convert_to_numpy(x)) for x in (a, b))))


def _bits(x: Any) -> Any:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


@contextlib.contextmanager
def _standing(functional: Any, run: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Puts run(inputs, operation_fn) in the place of a graph's own run, in this thread.

    Ranks that share a model each have their own.
    """
    runs: dict[int, Any] = vars(_here).setdefault("runs", {})
    with _lock:
        _users[id(functional)] = _users.get(id(functional), 0) + 1
        object.__setattr__(functional, _RUN, functools.partial(_run, functional))
    runs[id(functional)] = run
    try:
        yield
    finally:
        del runs[id(functional)]
        with _lock:
            _users[id(functional)] -= 1
            if not _users[id(functional)]:
                del _users[id(functional)]
                object.__delattr__(functional, _RUN)


def _run(functional: Any, inputs: Any, **how: Any) -> Any:
    run = vars(_here).get("runs", {}).get(id(functional))
    if run is None or set(how) - {"operation_fn"}:
        return getattr(type(functional), _RUN)(functional, inputs, **how)
    # From Keras 3.16 on a call gives none: operations are called as they are.
    return run(inputs, how.get("operation_fn", lambda operation: operation))

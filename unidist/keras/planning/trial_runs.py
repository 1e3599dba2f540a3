"""Runs a model without its kernels: every candidate's output is random, whatever its input is.

So a run needs no large variable, and a change of one candidate's output arrives at other candidates only through what
stands between them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import keras
import numpy as np
from keras import distribution as keras_distribution

from unidist.keras import recomputing
from unidist.keras.graphs import Graph, Record
from unidist.keras.layer_facts import keeps_numbers, stack_of
from unidist.keras.patching.compat import is_float_dtype, is_tensor, jax_utils, set_keras_mask, tree
from unidist.keras.patching.layer_calls import Call, Stage, around
from unidist.keras.planning.activations import Seen, keeps_what_it_takes
from unidist.keras.planning.candidates import Candidate, einsum_shape
from unidist.keras.planning.candidates import inside as within
from unidist.keras.planning.repeated_calls import Kinds, Repeats
from unidist.keras.planning.samples import RandomValues
from unidist.keras.planning.saved_tensors import Saved

# Random numbers that are drawn at once, and from the beginning of one window to that of the next: a prime.
POOL = 1 << 20
BETWEEN = 7919


@dataclass(frozen=True, slots=True)
class Change:
    """Names what is changed: one of `parts` slices of a candidate's output, along a kernel's dim in it."""

    candidate: int
    dim: int
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class Shaped:
    """In place of a tensor whose shape alone is asked for."""

    shape: tuple[int, ...]


@dataclass
class Trace:
    """One run: what each candidate took, what it gave in elements, and what came out.

    Attributes:
        stacked: the shapes of what each layer with a stack of kernels took.
        seen: what all layers took and gave, where it was asked for.
        graph, record: of a run that can be run again in parts (graphs.py); else None.
        inside: for each place of the graph the candidates there.
        touched: of a run in parts, the candidates that can have taken something else; None of a whole run.
        is_ended: it was ended before the change had arrived everywhere.
    """

    taken: dict[int, list[Any]] = field(default_factory=dict)
    given: dict[int, list[tuple[tuple[int, ...], bool]]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    stacked: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    seen: Seen | None = None
    graph: Graph | None = None
    record: Record | None = None
    inside: list[list[int]] = field(default_factory=list)
    touched: frozenset[int] | None = None
    is_ended: bool = False


class Runner:
    """Runs a model or layers of it, with their candidates' calls replaced while `installed`."""

    def __init__(self, candidates: list[Candidate], others: list[Any], again: list[Any]) -> None:
        """`others`: the model's layers that are no candidates. `again`: those that backward computes again.

        `of_stacks` is given a layer with a stack, what it took and what it gave; the run goes on with what it returns.
        """
        self.candidates = candidates
        self.index = {id(found.layer): k for k, found in enumerate(candidates)}
        self.composites = [layer for layer in others if any(id(one) in self.index for one in within(layer))]
        self.keeping = [layer for layer in others if keeps_numbers(layer)]
        self.others, self.again = others, again
        self.stacks = [layer for layer in others if stack_of(layer)]
        self.captured: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.read_elsewhere: set[int] = set()
        self.kinds = Kinds()
        self.of_stacks: Callable[[Any, Any, Any], Any] | None = None
        self._members: dict[int, list[int]] = {}
        self._totals: dict[int, list[float | None]] = {}
        self._repeats: Repeats | None = None
        self._owners = {id(v): k for k, c in enumerate(candidates) for v in c.variables}
        self._random: dict[tuple[int, int, tuple[int, ...]], Any] = {}
        self._pool = np.empty(0, "float32")
        self._values: dict[int, Any] = {}
        self._trace = Trace()
        self._change: Change | None = None
        self._capturing = False
        self._measuring = False
        self._marked: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def installed(self) -> Iterator[Runner]:
        before = keras_distribution.distribution()
        with contextlib.ExitStack() as stack:
            # What a model warns of, it warns of again when it is run in earnest.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.callback(keras_distribution.set_distribution, before)
            keras_distribution.set_distribution(None)
            inside: list[tuple[Any, Call, Any]] = [
                (found.layer, self._random_output, k) for k, found in enumerate(self.candidates)
            ]
            inside += [(layer, self._through, layer) for layer in self.composites]
            inside += [(layer, self._keeping, layer) for layer in self.keeping]
            inside += [(layer, self._looking_on, layer) for layer in self.others]
            inside += [(layer, self._stacked, layer) for layer in self.stacks]
            inside += [(layer, self._computed_again, layer) for layer in self.again]
            stack.enter_context(recomputing.marking(self.again, None))
            for layer, function, subject in inside:
                link = functools.partial(functools.partial, function, subject)
                stack.callback(around(layer, Stage.PLANNED, link))
            yield self

    def run(
        self,
        layer: Any,
        args: Any,
        kwargs: Any,
        change: Change | None = None,
        capture: bool = False,
        measure: bool = False,
        marked: frozenset[int] | None = None,
        saved: bool = False,
    ) -> Trace:
        """Calls a layer.

        Args:
            change: one slice of one candidate's output is changed.
            measure: for the shapes alone.
            marked: the outputs of these candidates are NaN. None: no run with NaN is compared with this one.
            saved: with autograd at work, on torch.
        """
        self._trace, self._change, self._capturing = Trace(), change, capture
        self._measuring, self._marked = measure, marked or frozenset()
        if capture:
            # Of a run that failed before, as on other rows, nothing counts.
            self.captured.clear()
        on_torch = keras.config.backend() == "torch"
        if saved:
            self._trace.seen = Saved(marked is not None)
        elif not on_torch and (capture or measure or marked):
            self._trace.seen = Seen(bool(marked))
        keeping = contextlib.nullcontext() if self._saved is None else self._saved.watching()
        with keeping, RandomValues(self._values, self._owners, self.read_elsewhere.add, self._saved) as scope:
            repeats = Repeats(self._trace, self._marked, self.kinds, self.members_of, self._totals, scope)
            self._repeats = repeats if on_torch and (measure or saved) else None
            outputs = layer(*args, **kwargs)
        self._trace.outputs += [t for t in tree.flatten((outputs, scope.losses)) if is_tensor(t)]
        return self._trace

    def members_of(self, layer: Any) -> list[int]:
        """The candidates in a layer."""
        if id(layer) not in self._members:
            self._members[id(layer)] = [self.index[id(x)] for x in within(layer) if id(x) in self.index]
        return self._members[id(layer)]

    @property
    def _saved(self) -> Saved | None:
        seen = self._trace.seen
        return seen if isinstance(seen, Saved) else None

    def run_kept(self, layer: Any, args: Any, kwargs: Any, capture: bool = False) -> Trace:
        """A run with nothing changed, kept so that it can be run again in parts, where that is possible."""
        graph = Graph.of(layer)
        if graph is None:
            return self.run(layer, args, kwargs, capture=capture)
        with graph.recording() as record:
            trace = self.run(layer, args, kwargs, capture=capture)
        # What is no number differs from itself: a whole run shows it wherever it is.
        if graph.is_whole(record) and not any(map(has_no_number, (*trace.outputs, *chain(*trace.taken.values())))):
            trace.inside = [[self.index[x] for x in layers if x in self.index] for layers in graph.inside]
            trace.graph, trace.record = graph, record
        return trace

    def run_changed(
        self, layer: Any, args: Any, kwargs: Any, change: Change, clean: Trace, ends: Callable[[Trace, list[int]], bool]
    ) -> Trace:
        """A run with a change: of what the change reaches, where the clean run was kept, else of all.

        Args:
            ends: asked behind each call in which the change arrives, with the candidates there: whether enough is seen.
        """
        graph, record = clean.graph, clean.record
        place = None if graph is None else graph.place_of(self.candidates[change.candidate].layer)
        if graph is None or record is None or place is None:
            return self.run(layer, args, kwargs, change)

        def goes_on(at: int, changed: bool) -> bool:
            replay.is_ended = at != place and ends(self._trace, clean.inside[at])
            return changed

        with graph.replaying(record, place, goes_on) as replay:
            trace = self.run(layer, args, kwargs, change)
        trace.touched = frozenset(k for at in replay.called for k in clean.inside[at])
        trace.is_ended = replay.is_ended
        expected = {k: len(clean.taken[k]) for k in trace.touched if k in clean.taken}
        if replay.has_written or expected != {k: len(taken) for k, taken in trace.taken.items()}:
            return self.run(layer, args, kwargs, change)
        return trace

    def _keeping(self, layer: Any, rest: Call, *args: Any, **kwargs: Any) -> Any:
        # What it keeps numbers of goes out of the model, as its outputs do.
        given = [t for t in tree.flatten((args, kwargs)) if is_tensor(t) and not jax_utils.is_in_jax_tracing_scope(t)]
        self._trace.outputs += [_numpy(t) for t in given if is_float_dtype(keras.backend.standardize_dtype(t.dtype))]
        return rest(*args, **kwargs)

    def _looking_on(self, layer: Any, rest: Call, *args: Any, **kwargs: Any) -> Any:
        seen = self._trace.seen
        if seen is None or self._saved is not None:
            return rest(*args, **kwargs)
        before = seen.calls
        given = rest(*args, **kwargs)
        if seen.calls == before:
            seen.add((args, kwargs, given))
        return given

    def _computed_again(self, layer: Any, rest: Call, *args: Any, **kwargs: Any) -> Any:
        seen = self._trace.seen
        with contextlib.nullcontext() if seen is None else seen.computed_again((args, kwargs)):
            return rest(*args, **kwargs)

    def _stacked(self, layer: Any, rest: Call, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._trace.stacked.setdefault(id(layer), []).append(tuple(inputs.shape))
        size = stack_of(layer)[0].shape[0]
        with contextlib.nullcontext() if self._saved is None else self._saved.in_stack(size, inputs):
            out = rest(inputs, *args, **kwargs)
        return out if self.of_stacks is None else self.of_stacks(layer, inputs, out)

    def _through(self, layer: Any, rest: Call, *args: Any, **kwargs: Any) -> Any:
        # What a layer is called with inside a program, as a recurrent layer's cell, is worth nothing outside.
        if self._capturing and not any(map(jax_utils.is_in_jax_tracing_scope, tree.flatten((args, kwargs)))):
            self.captured.setdefault(id(layer), (args, kwargs))
        return rest(*args, **kwargs) if self._repeats is None else self._repeats.call(layer, rest, args, kwargs)

    def _random_output(self, index: int, rest: Call, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = self.candidates[index]
        reverse = bool(kwargs.get("reverse", args[0] if args and found.kind == "table" else False))
        shape = self._output_shape(found, inputs, reverse)
        calls = self._trace.given.setdefault(index, [])
        key = (index, len(calls), shape)
        if jax_utils.is_in_jax_tracing_scope(inputs):
            # In a program, as a recurrent layer's cell: nobody sees what goes on there, so its weights stay whole.
            self.read_elsewhere.add(index)
        else:
            taken = Shaped(tuple(inputs.shape)) if self._measuring or self._saved is not None else inputs
            self._trace.taken.setdefault(index, []).append(taken)
            calls.append((shape, reverse))
        value = self._random.get(key)
        if self._measuring or self._saved is not None:
            value = np.full(shape, 0.5, "float32")  # shapes alone count, and where NaN is
        if value is None:
            value = self._random[key] = self._drawn(shape)
        if self._change is not None and self._change.candidate == index and not reverse:
            value = _changed(value, found.outputs[self._change.dim], self._change)
        marked = index in self._marked and not reverse
        if marked:
            value = np.full(shape, np.nan, "float32")
        before = y = keras.ops.convert_to_tensor(value, found.layer.compute_dtype)
        activation = getattr(found.layer, "activation", None)
        y = y if activation is None else activation(y)
        if (seen := self._trace.seen) is not None and self._saved is None:
            seen.add(inputs)
            seen.source = index if marked else seen.source
            seen.add((before if keeps_what_it_takes(activation) else None, y))
        if self._saved is not None:
            activated = getattr(activation, "__name__", "linear") != "linear"
            call = lambda x: rest(x, *args, **kwargs)  # noqa: E731
            y = self._saved.of_layer(call, inputs, y, activated, index if marked else None)
        if found.kind == "table" and not reverse:
            mask = keras.layers.Embedding.compute_mask(found.layer, inputs)
            if mask is not None:
                set_keras_mask(y, mask)
        return y

    def _drawn(self, shape: tuple[int, ...]) -> Any:
        """Returns random numbers: a window of one pool, as a large model's outputs would fill the memory.

        No two windows begin at the same place.
        """
        size = prod(shape)
        if self._pool.size < 2 * size + POOL:
            self._pool = np.random.default_rng(size).standard_normal(2 * size + POOL, "float32")
        begin = len(self._random) * BETWEEN % (self._pool.size - size)
        return self._pool[begin : begin + size].reshape(shape)

    def _output_shape(self, found: Candidate, inputs: Any, reverse: bool) -> tuple[int, ...]:
        shape = tuple(inputs.shape)
        if found.kind == "table":
            return (*shape[:-1], found.layer.input_dim) if reverse else (*shape, found.layer.output_dim)
        if isinstance(found.layer, keras.layers.EinsumDense):
            return einsum_shape(found.layer.equation, shape, tuple(found.kernel.shape))
        return tuple(found.layer.compute_output_shape(shape))


def has_no_number(tensor: Any) -> bool:
    """Returns whether a NaN is in a tensor."""
    value = _numpy(tensor)
    return bool((value != value).any())


def _changed(value: Any, dim: int, change: Change) -> Any:
    value = value.copy()
    size = value.shape[dim] // change.parts
    where = [slice(None)] * value.ndim
    where[dim] = slice(change.part * size, (change.part + 1) * size)
    part = value[tuple(where)]
    value[tuple(where)] = part + np.random.default_rng(change.part + 7).uniform(0.5, 2.0, part.shape)
    return value


def _numpy(tensor: Any) -> Any:
    return keras.ops.convert_to_numpy(tensor)

"""Repeats: where shapes alone count, one of several blocks that are alike is called, on torch.

A stack's blocks differ in where they stand. What was noted of one's call is noted for the others, each with its own
layers and variables, which have the same places in it. So a run costs what its different blocks cost.

Runs with NaN and one without are compared by sums of values. So that these do not depend on how many blocks came
before, or on which of them were called, what a block gives is made one number, where it is what it is without NaN.

Two layers are of one kind if they are of one class and hold equal attributes, alike layers and variables of equal
shapes; names, places in the model and random seeds aside. What cannot be compared is like nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from unidist.keras.layers import children
from unidist.keras.patching.compat import get_keras_mask, get_stateless_scope, is_tensor, set_keras_mask, tree
from unidist.keras.patching.layer_calls import ENTRANCES, Call
from unidist.keras.planning.saved_tensors import Saved, held_shape

# What concerns variables alone and no path between layers.
_ON_VARIABLES = (keras.initializers.Initializer, keras.constraints.Constraint, keras.regularizers.Regularizer)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type)


class Kinds:
    """Numbers of kinds, of one model's layers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._of: dict[int, int] = {}

    def of(self, layer: Any) -> int:
        found = self._of.get(id(layer))
        if found is None:
            kind = (
                type(layer),
                tuple((name, self.described(value)) for name, value in sorted(_own(layer)) if _counts(name)),
                tuple((tuple(v.shape), v.dtype, v.trainable) for v in layer.variables),
                str(layer.dtype_policy.name),
                tuple(self.of(child) for child in children(layer)),
            )
            found = self._of[id(layer)] = self._numbers.setdefault(kind, len(self._numbers))
        return found

    def described(self, value: Any) -> Any:
        """Something that is equal for equal values and can be hashed."""
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, (keras.layers.Layer, keras.Variable, keras.random.SeedGenerator)):
            # Layers and variables count where they are tracked; a seed changes no path.
            return type(value)
        if isinstance(value, (list, tuple)):
            return type(value), tuple(self.described(x) for x in value)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(self.described(x) for x in value)
        if isinstance(value, dict):
            return type(value), tuple((self.described(k), self.described(x)) for k, x in value.items())
        if isinstance(value, _ON_VARIABLES):
            return type(value)
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return type(value), tuple(self.described(getattr(value, field.name)) for field in fields)
        return type(value), id(value)


def _own(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yields a layer's attributes but for unidist's own.

    A call that stands before its class's, as a runner's does, is that of its class.
    """
    for name, value in vars(layer).items():
        if name.startswith("_unidist"):
            continue
        if name not in ENTRANCES or getattr(inspect.unwrap(value), "__func__", None) is not getattr(type(layer), name):
            yield name, value


@functools.cache
def _of_every_layer() -> frozenset[str]:
    return frozenset(vars(keras.layers.Layer()))


def _counts(name: str) -> bool:
    return name not in _of_every_layer()


if TYPE_CHECKING:
    from unidist.keras.planning.trial_runs import Trace


class Place:
    """A layer in a run, with what is its own there.

    Attributes:
        members: its candidates. variables: the ids of its variables. source: the candidate that gave NaN last, before.
        inputs: the tensors that it takes, and the masks on them.
    """

    def __init__(self, layer: Any, members: list[int], inputs: list[Any], source: int | None) -> None:
        self.layer, self.members, self.inputs, self.source = layer, members, inputs, source
        self.variables = [id(v) for v in layer.variables]

    def candidate(self, found: int | None, other: Place) -> int | None:
        """Returns what a candidate of another place is here."""
        if found in other.members:
            return self.members[other.members.index(found)]
        return self.source if found == other.source else found

    def variable(self, found: int, other: Place) -> int:
        return self.variables[other.variables.index(found)] if found in other.variables else found


@dataclass
class Noted:
    """Holds what the call of a layer has added to a run.

    Attributes:
        calls: of each of the candidates, what it took and gave.
        seen: what autograd keeps, and the ids of variables that were read, and are kept.
        source: the candidate that gave NaN last, behind it.
        written: what variables hold behind it.
        outputs: what it gave. counted: the tensors, of those and of the inputs, whose memory is counted by now.
    """

    place: Place
    calls: list[tuple[list[Any], list[Any]]]
    seen: tuple[list[Any], list[int], list[int]]
    source: int | None
    written: dict[int, Any]
    outputs: Any
    counted: list[Any]


class Repeats:
    """The calls of one run.

    Args:
        trace: of the run.
        marked: the candidates whose outputs are NaN.
        members: gives the candidates in a layer.
        totals: of what layers give, by their ids, in the run without NaN.
    """

    def __init__(
        self,
        trace: Trace,
        marked: frozenset[int],
        kinds: Kinds,
        members: Callable[[Any], list[int]],
        totals: dict[int, list[float | None]],
        scope: Any,
    ) -> None:
        self._trace, self._marked, self._kinds, self._members, self._scope = trace, marked, kinds, members, scope
        self._totals = totals
        self._saved = trace.seen if isinstance(trace.seen, Saved) else None
        self._noted: dict[Any, Noted] = {}
        self._called: set[int] = set()

    def call(self, layer: Any, rest: Call, args: Any, kwargs: Any) -> Any:
        """Calls a layer, or repeats what was noted of one that is like it."""
        if id(layer) in self._called or get_stateless_scope() is not self._scope:
            return rest(*args, **kwargs)
        self._called.add(id(layer))
        inputs = [x for x in tree.flatten((args, kwargs)) if is_tensor(x)]
        inputs += [mask for x in inputs if (mask := get_keras_mask(x)) is not None]
        source = None if self._saved is None else self._saved.source
        place = Place(layer, self._members(layer), inputs, source)
        key = self._key(place, args, kwargs)
        if key in self._noted:
            return self._repeat(self._noted[key], place)
        before = self._state(place)
        outputs = rest(*args, **kwargs)
        given = tree.flatten(outputs)
        if all(self._can_be_made_again(x, place) for x in given):
            self._level(layer, [x for x in given if is_tensor(x) and not any(x is one for one in inputs)])
            self._noted[key] = self._note(place, before, outputs)
        return outputs

    def _level(self, layer: Any, made: list[Any]) -> None:
        """Lets what a layer has made be one number, where it is what it is without NaN."""
        if self._saved is None or not self._saved.marking:
            return
        totals = [self._saved.total(x) for x in made]
        clean = self._totals.get(id(layer), totals) if self._marked else self._totals.setdefault(id(layer), totals)
        for x, total, was in zip(made, totals, clean, strict=True):
            if total is not None and total == was:
                x.detach().fill_(0.5)

    def _key(self, place: Place, args: Any, kwargs: Any) -> Any:
        memory: dict[int, int] = {}

        def token(x: Any) -> Any:
            if not is_tensor(x):
                return x
            alike = (tuple(x.shape), held_shape(x), x.stride(), str(x.dtype), x.requires_grad, x.is_leaf)
            which = memory.setdefault(x.untyped_storage()._cdata, len(memory))
            # In words, of which that of a NaN is equal to itself.
            state = None if self._saved is None else (self._saved.counted(x), repr(self._saved.total(x)))
            return (*alike, which, state, token(get_keras_mask(x)))

        marked = tuple(k for k, member in enumerate(place.members) if member in self._marked)
        return self._kinds.of(place.layer), marked, self._kinds.described(tree.map_structure(token, (args, kwargs)))

    def _state(self, place: Place) -> tuple[Any, ...]:
        trace, saved = self._trace, self._saved
        calls = [len(trace.given.get(k, ())) for k in place.members]
        seen = (0, 0, 0) if saved is None else (len(saved.tensors), len(saved.read), len(saved.weights))
        return calls, seen, dict(self._scope.state_mapping)

    def _note(self, place: Place, before: tuple[Any, ...], outputs: Any) -> Noted:
        calls, seen, written = before
        trace, saved, now = self._trace, self._saved, self._scope.state_mapping
        tensors = [*place.inputs, *filter(is_tensor, tree.flatten(outputs))]
        return Noted(
            place,
            [
                (trace.taken.get(k, [])[n:], trace.given.get(k, [])[n:])
                for k, n in zip(place.members, calls, strict=True)
            ],
            ([], [], [])
            if saved is None
            else (saved.tensors[seen[0] :], saved.read[seen[1] :], saved.weights[seen[2] :]),
            None if saved is None else saved.source,
            {one: value for one, value in now.items() if written.get(one) is not value},
            outputs,
            [x for x in tensors if saved is not None and saved.counted(x) is True],
        )

    def _can_be_made_again(self, x: Any, place: Place) -> bool:
        if not is_tensor(x) or any(x is one for one in place.inputs):
            return x is None or is_tensor(x)
        if self._saved is not None and not isinstance(self._saved.counted(x), bool):
            return False  # a weight
        base, memory = x if x._base is None else x._base, x.untyped_storage()
        is_own = memory._cdata not in {one.untyped_storage()._cdata for one in place.inputs}
        return is_own and base.is_contiguous() and memory.nbytes() == base.numel() * base.itemsize

    def _repeat(self, noted: Noted, place: Place) -> Any:
        trace, saved, other = self._trace, self._saved, noted.place
        for k, (taken, given) in zip(place.members, noted.calls, strict=True):
            trace.taken.setdefault(k, []).extend(taken)
            trace.given.setdefault(k, []).extend(given)
        for variable, value in noted.written.items():
            self._scope.state_mapping[place.variable(variable, other)] = value
        made: dict[int, Any] = {id(a): b for a, b in zip(other.inputs, place.inputs, strict=True)}

        def again(x: Any) -> Any:
            if not is_tensor(x):
                return x
            if id(x) not in made:
                made[id(x)] = _again(x, made)
                if (mask := get_keras_mask(x)) is not None:
                    set_keras_mask(made[id(x)], again(mask))
            return made[id(x)]

        outputs = tree.map_structure(again, noted.outputs)
        if saved is not None:
            tensors, read, weights = noted.seen
            for one in tensors:
                saved.again(one, lambda k: place.candidate(k, other))
            saved.read += [place.variable(one, other) for one in read]
            saved.weights += [place.variable(one, other) for one in weights]
            saved.source = place.candidate(noted.source, other)
            if saved.marking and not self._marked:
                self._totals[id(place.layer)] = self._totals[id(other.layer)]
            for x in noted.counted:
                saved.count(made[id(x)])
        return outputs


def _again(x: Any, made: dict[int, Any]) -> Any:
    """Returns a tensor like another, in memory of its own."""
    if x._base is None:
        return x.clone() if x.requires_grad else x.detach().clone()
    if id(x._base) not in made:
        made[id(x._base)] = _again(x._base, made)
    return made[id(x._base)].as_strided(x.shape, x.stride(), x.storage_offset())

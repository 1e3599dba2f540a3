"""Reaching: at which candidates a change of one slice of a candidate's output arrives, and whether as that slice.

A change is looked for in the smallest layer around its source first, run alone on what it was called with: where that
layer's own output stays the same nothing left it. Where it changes, the layer around it is next, up to the model.
Layers of one kind (kinds.py) answer alike, and are asked once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from unidist.keras.planning.candidates import Candidate, children, inside
from unidist.keras.planning.kinds import Kinds
from unidist.keras.planning.running import Change, Runner, Trace, _numpy
from unidist.planner.facts import Reach


@dataclass(frozen=True, slots=True)
class Answer:
    """What was seen inside one layer; candidates by their place in it."""

    arrivals: tuple[tuple[int, int], ...] = ()
    spread: tuple[int, ...] = ()
    left: bool = True


class Reacher:
    """Finds the reaches of a model's candidates, for `parts` slices; `run`: the model's own, with nothing changed."""

    def __init__(self, runner: Runner, model: Any, parts: int, run: Trace) -> None:
        self.runner = runner
        self.model = model
        self.parts = parts
        self._index = {id(c.layer): k for k, c in enumerate(runner.candidates)}
        self._members: dict[int, list[int]] = {}
        self._places: dict[int, dict[int, int]] = {}
        self._clean: dict[int, Trace] = {id(model): run}
        self._kinds = Kinds()
        self._answers: dict[Any, Answer] = {}
        self._around: dict[int, list[Any]] = {}

    def all(self) -> list[Reach]:
        """A reach for each product and each dim of its outputs that divides."""
        self._find_around(self.model, [])
        out = []
        for index, found in enumerate(self.runner.candidates):
            if found.kind != "product" or found.layer.activity_regularizer is not None:
                continue
            for dim in found.outputs:
                if found.kernel.shape[dim] % self.parts == 0 and index in self._around:
                    out.append(self._reach(index, dim))
        return out

    def _find_around(self, layer: Any, outer: list[Any]) -> None:
        """For each candidate the layers around it that were called, outermost first; of several, the first found."""
        if id(layer) in self.runner.captured:
            outer = [*outer, layer]
        for child in children(layer):
            index = self._index.get(id(child))
            if index is None:
                self._find_around(child, outer)
            elif outer:
                self._around.setdefault(index, outer)

    def _reach(self, index: int, dim: int) -> Reach:
        around = self._around[index]
        answer = Answer()
        members: list[int] = []
        for level in range(len(around) - 1, -1, -1):
            members = self._members_of(around[level])
            answer = self._answer(around, level, index, dim)
            if not answer.left or answer.spread:
                break
        return Reach(
            source=index,
            dim=dim,
            arrivals=tuple((members[k], d) for k, d in answer.arrivals),
            spread=tuple(members[k] for k in answer.spread),
            leaked=answer.left,
        )

    def _answer(self, around: list[Any], level: int, index: int, dim: int) -> Answer:
        layer = around[level]
        place = self._places_in(layer)[index]
        if level == len(around) - 1:
            key: Any = (self._kinds.of(layer), place, dim)
        else:
            # The blocks of a stack differ in where they stand, so of what was seen around one only a no is for all.
            block = around[level + 1]
            key = (self._kinds.of(layer), self._kinds.of(block), self._places_in(block)[index], dim)
        found = self._answers.get(key)
        if found is None or (level < len(around) - 1 and not (found.left or found.spread)):
            found = self._answers[key] = self._ask(layer, index, dim)
        return found

    def _ask(self, layer: Any, index: int, dim: int) -> Answer:
        """Runs a layer with the first, the second and the last slice changed: a shift or a sum along the dim shows in
        one of them."""
        answers = []
        for part in sorted({0, 1, self.parts - 1}):
            answers.append(self._ask_part(layer, Change(index, dim, part, self.parts)))
            if answers[-1].spread or answers[-1].left:
                return answers[-1]
        if any(answer.arrivals != answers[0].arrivals for answer in answers):
            spread = sorted({place for answer in answers for place, _ in answer.arrivals})
            return Answer(spread=tuple(spread), left=False)
        return Answer(answers[0].arrivals, (), False)

    def _ask_part(self, layer: Any, change: Change) -> Answer:
        args, kwargs = self.runner.captured[id(layer)]
        if id(layer) not in self._clean:
            self._clean[id(layer)] = self.runner.run_kept(layer, args, kwargs)
        clean = self._clean[id(layer)]
        trace = self.runner.run_changed(layer, args, kwargs, change, clean)
        arrivals: list[tuple[int, int]] = []
        spread: list[int] = []
        places = self._places_in(layer)
        for member in sorted(places if trace.touched is None else trace.touched, key=places.__getitem__):
            place = places[member]
            taken, before = trace.taken.get(member, []), clean.taken.get(member, [])
            if not taken and not before:
                continue
            if len(taken) != len(before):
                spread.append(place)
                continue
            where = [_difference(a, b) for a, b in zip(taken, before, strict=True)]
            hit = [w for w in where if w.any()]
            if hit:
                dim = _confined(self.runner.candidates[member], hit, change)
                if dim is None:
                    spread.append(place)
                else:
                    arrivals.append((place, dim))
        left = len(trace.outputs) != len(clean.outputs) or any(
            _differs(a, b, clean) for a, b in zip(trace.outputs, clean.outputs, strict=False)
        )
        return Answer(tuple(arrivals), tuple(spread), bool(left))

    def _places_in(self, layer: Any) -> dict[int, int]:
        """Candidate -> its place in a layer."""
        if id(layer) not in self._places:
            self._places[id(layer)] = {member: place for place, member in enumerate(self._members_of(layer))}
        return self._places[id(layer)]

    def _members_of(self, layer: Any) -> list[int]:
        if id(layer) not in self._members:
            self._members[id(layer)] = [self._index[id(x)] for x in inside(layer) if id(x) in self._index]
        return self._members[id(layer)]


def _differs(a: Any, b: Any, clean: Trace) -> bool:
    # A run that is kept has numbers alone, which are equal to themselves.
    return not (a is b and clean.record is not None) and bool(_difference(a, b).any())


def _difference(a: Any, b: Any) -> Any:
    return np.asarray(_numpy(a) != _numpy(b)) if a.shape == b.shape else np.ones((1,), bool)


def _confined(found: Candidate, where: list[Any], change: Change) -> int | None:
    """The summed kernel dim along which all differences lie in the changed slice and nowhere else; None: in none."""
    for kernel_dim, dim in found.inputs.items():
        size = found.kernel.shape[kernel_dim]
        if size % change.parts:
            continue
        step = size // change.parts
        if all(_lies_in(w, dim, change.part * step, step, size) for w in where):
            return kernel_dim
    return None


def _lies_in(where: Any, dim: int, start: int, length: int, size: int) -> bool:
    if where.ndim < 2 or where.shape[dim] != size:
        return False
    along = np.moveaxis(where, dim, 0).reshape(size, -1).any(axis=1)
    return bool(along.any() and not along[:start].any() and not along[start + length :].any())

"""Reaching: finds the candidates at which a change of one slice of an output arrives, and how.

The question is whether it arrives as that slice.

A change is looked for in the smallest layer around its source first, run alone on what it was called with: where that
layer's own output stays the same nothing left it. Where it changes, the layer around it is next, up to the model.
Layers of one kind (kinds.py) answer alike, and are asked once.

What spreads makes no pair, and where else it arrives matters to few: to those whose outputs meet a pair whole. So a run
in parts (graphs.py) ends where a change has spread, and is made again to its end where that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unidist.keras.layers import children
from unidist.keras.planning.candidates import Candidate
from unidist.keras.planning.trial_runs import Change, Runner, Trace, _numpy
from unidist.planner.facts import Reach


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds what was seen inside one layer; candidates by their place in it. `is_whole`: all there is."""

    arrivals: tuple[tuple[int, int], ...] = ()
    spread: tuple[int, ...] = ()
    left: bool = True
    is_whole: bool = True


class Reacher:
    """Finds the reaches of a model's candidates, for `parts` slices.

    `run`: the model's own, with nothing changed.
    """

    def __init__(self, runner: Runner, model: Any, parts: int, run: Trace) -> None:
        self.runner = runner
        self.model = model
        self.parts = parts
        self._places: dict[int, dict[int, int]] = {}
        self._clean: dict[int, Trace] = {id(model): run}
        self._kinds = runner.kinds
        self._answers: dict[Any, Answer] = {}
        self._around: dict[int, list[Any]] = {}
        self._to_the_end = False

    def all(self) -> list[Reach]:
        """A reach for each product and each dim of its outputs that divides; not all of them to the end."""
        self._find_around(self.model, [])
        out = []
        for index, found in enumerate(self.runner.candidates):
            if found.kind != "product" or found.layer.activity_regularizer is not None:
                continue
            for dim in found.outputs:
                if found.kernel.shape[dim] % self.parts == 0 and index in self._around:
                    out.append(self._reach(index, dim))
        return out

    def to_the_end(self, reach: Reach) -> Reach:
        """The reach with all that a change arrives at."""
        self._to_the_end = True
        try:
            return self._reach(reach.source, reach.dim)
        finally:
            self._to_the_end = False

    def _find_around(self, layer: Any, outer: list[Any]) -> None:
        """Finds for each candidate the layers around it that were called, outermost first.

        Of several, the first found.
        """
        if id(layer) in self.runner.captured:
            outer = [*outer, layer]
        for child in children(layer):
            index = self.runner.index.get(id(child))
            if index is None:
                self._find_around(child, outer)
            elif outer:
                self._around.setdefault(index, outer)

    def _reach(self, index: int, dim: int) -> Reach:
        around = self._around[index]
        answer = Answer()
        members: list[int] = []
        for level in range(len(around) - 1, -1, -1):
            members = self.runner.members_of(around[level])
            answer = self._answer(around, level, index, dim)
            if not answer.left or answer.spread:
                break
        return Reach(
            source=index,
            dim=dim,
            arrivals=tuple((members[k], d) for k, d in answer.arrivals),
            spread=tuple(members[k] for k in answer.spread),
            leaked=answer.left,
            is_whole=answer.is_whole,
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
        if found is not None and not found.is_whole and self._to_the_end:
            found = None
        if found is None or (level < len(around) - 1 and not (found.left or found.spread)):
            # What is seen for other blocks too is seen to the end.
            ends = level == len(around) - 1 and not self._to_the_end
            found = self._answers[key] = self._ask(layer, index, dim, ends)
        return found

    def _ask(self, layer: Any, index: int, dim: int, ends: bool) -> Answer:
        """Runs a layer with the first, the second and the last slice changed.

        A shift or a sum along the dim shows in one of them. With `ends` it may end where the change has spread.
        """
        answers = []
        for part in sorted({0, 1, self.parts - 1}):
            answers.append(self._ask_part(layer, Change(index, dim, part, self.parts), ends))
            if answers[-1].spread or answers[-1].left:
                return answers[-1]
        if any(answer.arrivals != answers[0].arrivals for answer in answers):
            spread = sorted({place for answer in answers for place, _ in answer.arrivals})
            return Answer(spread=tuple(spread), left=False)
        return Answer(answers[0].arrivals, (), False)

    def _ask_part(self, layer: Any, change: Change, ends: bool) -> Answer:
        args, kwargs = self.runner.captured[id(layer)]
        if id(layer) not in self._clean:
            self._clean[id(layer)] = self.runner.run_kept(layer, args, kwargs)
        clean = self._clean[id(layer)]
        arrived: dict[int, tuple[bool, int | None]] = {}

        def look(trace: Trace, members: Iterable[int]) -> bool:
            """Returns whether it has spread."""
            arrived.update((member, self._arrival(member, trace, clean, change)) for member in members)
            return any(arrived[member] == (True, None) for member in members)

        def enough(trace: Trace, members: list[int]) -> bool:
            return ends and look(trace, members)

        trace = self.runner.run_changed(layer, args, kwargs, change, clean, enough)
        places = self._places_in(layer)
        members = sorted(places if trace.touched is None else trace.touched, key=places.__getitem__)
        look(trace, members)
        found = [(places[member], *arrived[member]) for member in members]
        left = len(trace.outputs) != len(clean.outputs) or any(
            _differs(a, b, clean) for a, b in zip(trace.outputs, clean.outputs, strict=False)
        )
        return Answer(
            arrivals=tuple((place, dim) for place, hit, dim in found if hit and dim is not None),
            spread=tuple(place for place, hit, dim in found if hit and dim is None),
            left=left,
            is_whole=not trace.is_ended,
        )

    def _arrival(self, member: int, trace: Trace, clean: Trace, change: Change) -> tuple[bool, int | None]:
        """Returns whether a change arrived at a candidate, and along which summed kernel dim as its slice."""
        taken, before = trace.taken.get(member, []), clean.taken.get(member, [])
        if len(taken) != len(before):
            return True, None
        where = [_difference(a, b) for a, b in zip(taken, before, strict=True)]
        hit = [w for w in where if w.any()]
        return bool(hit), _confined(self.runner.candidates[member], hit, change) if hit else None

    def _places_in(self, layer: Any) -> dict[int, int]:
        if id(layer) not in self._places:
            self._places[id(layer)] = {member: place for place, member in enumerate(self.runner.members_of(layer))}
        return self._places[id(layer)]


def _differs(a: Any, b: Any, clean: Trace) -> bool:
    # A run that is kept has numbers alone, which are equal to themselves.
    return not (a is b and clean.record is not None) and bool(_difference(a, b).any())


def _difference(a: Any, b: Any) -> Any:
    return np.asarray(_numpy(a) != _numpy(b)) if a.shape == b.shape else np.ones((1,), bool)


def _confined(found: Candidate, where: list[Any], change: Change) -> int | None:
    """Returns the summed kernel dim along which all differences are in the changed slice; None: in none."""
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

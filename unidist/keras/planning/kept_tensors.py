"""Finds what a step keeps for its backward, in small runs of a model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from unidist.keras.patching.compat import tree
from unidist.keras.planning import samples
from unidist.keras.planning.activations import Seen, Seens
from unidist.keras.planning.trial_runs import Runner, Trace
from unidist.planner.facts import Affine, Amount


@dataclass(frozen=True, slots=True)
class Runs:
    """Holds the model's run, and the shapes of one on longer sequences and of one of twice the rows.

    The longer one is the same where none can be longer. The one of twice the rows is None where the model takes no such
    many.
    """

    near: Trace
    far: Trace
    wide: Trace | None
    rows: int
    lengths: tuple[int, int]

    def line(self, near: float, far: float) -> Affine:
        """Returns the line through what is so large in the one run, and so large in the other."""
        slope = (far - near) / (self.lengths[1] - self.lengths[0])
        return Affine(near - slope * self.lengths[0], slope)

    def amounts(self, elements: Callable[[Trace], list[int]]) -> tuple[Amount, ...]:
        """Returns what some calls take or give, at any number of rows and any length.

        Args:
            elements: of each of the calls in a run.
        """
        near: Sequence[float] = elements(self.near)
        far: Sequence[float] = elements(self.far)
        wide: Sequence[float] = [2 * n for n in near] if self.wide is None else elements(self.wide)
        if not len(near) == len(far) == len(wide):
            # A model that takes more steps for a longer sequence: all calls alike.
            near, far, wide = ([sum(run) / len(near)] * len(near) for run in (near, far, wide))
        return tuple(self._amount(*found) for found in zip(near, far, wide, strict=True))

    def _amount(self, near: float, far: float, wide: float) -> Amount:
        share = (wide - near) / near if near else 1.0
        each = self.line(near, far).times(share / self.rows)
        return Amount(each, self.line(near, far).times(1 - share))


def seen_in_runs(runner: Runner, model: Any, inputs: Any, runs: Runs, reaches: list[Any]) -> Seens:
    """Returns what a step keeps, seen in runs.

    Where a pair's first layer gives NaN, what depends on it up to the pair's last layer has it, as nothing else is
    reached.
    """
    keeps = keras.config.backend() == "torch"
    kwargs = {"training": keeps} if model._call_has_training_arg else {}

    def seen(given: Any, marked: frozenset[int] | None = None) -> Seen:
        found = runner.run(model, (given,), kwargs, marked=marked, saved=keeps).seen
        return Seen() if found is None else found

    def given(rows: int, length: int) -> Any:
        return samples.sample(model, inputs, rows, length)

    marks = _marks(reaches)
    near, far, wide = runs.near.seen or Seen(), runs.far.seen or Seen(), None
    shortest, longest = runs.lengths
    if keeps:
        near = seen(given(runs.rows, shortest), frozenset() if marks else None)
        far = near if runs.far is runs.near else seen(given(runs.rows, longest))
        twice = given(2 * runs.rows, shortest)
        if rows_of(twice) == {2 * runs.rows}:
            with contextlib.suppress(Exception):  # a model may take so many rows alone
                wide = seen(twice).tensors
    marked = []
    for sources in marks:
        # A model, or a framework that looks for mistakes, may refuse NaN: then nothing is known to be cut.
        with contextlib.suppress(Exception):
            marked.append(seen(given(runs.rows, shortest), sources).tensors)
    return Seens(near.tensors, far.tensors, wide, marked, tuple(near.read), tuple(near.weights))


def rows_of(given: Any) -> set[int]:
    return {x.shape[0] for x in tree.flatten(given) if x is not None and len(x.shape)}


def _marks(reaches: list[Any]) -> list[frozenset[int]]:
    """First layers of pairs, of each pair one at a time."""
    of_pairs: dict[int, list[int]] = {}
    for reach in reaches:
        if reach.target is not None:
            of_pairs.setdefault(reach.target[0], []).append(reach.source)
    each = [list(dict.fromkeys(sources)) for sources in of_pairs.values()]
    return [frozenset(filter(None.__ne__, turn)) for turn in itertools.zip_longest(*each)]

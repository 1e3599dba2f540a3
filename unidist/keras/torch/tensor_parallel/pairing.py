"""A model's pairs while it is trained: proven at its first step, and again once the model has changed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from unidist.keras import telling
from unidist.keras.calls import Call, Stage
from unidist.keras.compat import tree
from unidist.keras.torch.calls import around_call
from unidist.keras.torch.context import Frame
from unidist.keras.torch.moving import rows_from
from unidist.keras.torch.tensor_parallel import pairs, rules
from unidist.keras.torch.tensor_parallel.verdicts import KINDS, Verdict

_log = logging.getLogger("unidist.keras.torch.engine")
PROBE_ROWS = 2
# How often a model may change before nothing of it is paired any more.
_CHANGES = 8


class Pairing:
    """The pairs of a model.

    Args:
        exact: layers draw one device's random numbers, so none may draw for a part.

    Attributes:
        rules: of the model's layers.
        pairs: those that are in use; None: to be proven at the next step.
        verdicts: by a rule's id, what was found of it.
    """

    def __init__(self, model: Any, exact: bool = False) -> None:
        self.model = model
        self._exact = exact
        self.rules: list[rules.Rule] = []
        self.pairs: list[pairs.Pair] | None = None
        self.verdicts: dict[int, Verdict] = {}
        self._proven_on: set[int] = set()
        self._installed: list[Callable[[], None]] = []
        self._changes = 0
        self._gives_up = False

    def is_due(self, ranks: Iterable[int]) -> bool:
        """Whether pairs are still to be proven on some of these ranks."""
        return not self._gives_up and (self.pairs is None or not self._proven_on.issuperset(ranks))

    def prove(self, frame: Frame, x: Any) -> bool:
        """Proves the pairs on a few rows of inputs, once for each rank: whether that was still to do. A collective."""
        if not self.is_due([frame.rank]):
            return False
        found, verdicts = pairs.prove(self.model, self.rules, frame, _samples(frame, x))
        if self._exact:
            found, verdicts = pairs.without_draws(found, verdicts)
        self._proven_on.add(frame.rank)
        if self.pairs is not None:
            return True
        self.pairs, self.verdicts = found, verdicts
        if verdicts:
            rows = f": into {telling.listed(repr(pair.row.name) for pair in found)}" if found else ""
            _log.info("model %r: pairs proven: %d%s", self.model.name, len(found), rows)
            self._say(verdicts)
        self._installed += pairs.hold(self, self.model, found)
        self._installed += [_distinct_seeds(layer, pair) for pair in found for layer in pair.random]
        return True

    def part_changed(self) -> None:
        """Parts pairs with a layer that computes in another way by now, as with a low-rank kernel: it gathers."""
        for pair in list(self.pairs or ()):
            if (verdicts := pairs.parted(pair)) is not None:
                self.pairs = [other for other in self.pairs or () if other is not pair]
                self.verdicts |= verdicts
                self._say(verdicts)

    def forget(self) -> None:
        """Whatever was proven is to be proven again, at the next step."""
        for pair in self.pairs or ():
            pairs.let_go(pair)
        for undo in self._installed:
            undo()
        self._installed.clear()
        self._proven_on.clear()
        self.pairs, self.verdicts = None, {}

    def follow_change(self) -> None:
        """Layers have changed, as between two steps. Where they always do, nothing is paired any more."""
        self._changes += 1
        self.forget()
        if self._changes > _CHANGES:
            self._gives_up, self.pairs = True, []
            reason = "a layer of the model changes again and again"
            self.verdicts = {id(r): Verdict(r.name, r.kind, reason=reason) for r in self.rules if r.kind in KINDS}
            self._say(self.verdicts)

    def _say(self, verdicts: dict[int, Verdict]) -> None:
        telling.said((verdict.path, str(verdict)) for verdict in verdicts.values())


def _samples(frame: Frame, x: Any) -> list[Any]:
    """Inputs to prove pairs on: a few rows of a batch, then as many as the batch of all shards has, for layers that
    need their batch to divide; or all of one that has no rows to cut by."""
    if frame.rows is None:
        return [x]
    counts = [PROBE_ROWS, frame.rows.total]
    return [tree.map_structure(functools.partial(_of_rows, count), x) for count in counts]


def _of_rows(count: int, x: Any) -> Any:
    """The first rows of a tensor, again and again where it has fewer: all ranks have as many, and see alike whether
    the model takes them."""
    if x is None:
        return None
    x = torch.as_tensor(x)
    x = x if len(x) else x.new_zeros((1, *x.shape[1:]))
    times = -(-count // len(x))
    return rows_from(x if times == 1 else torch.cat([x] * times), 0, count)


def _distinct_seeds(layer: Any, pair: pairs.Pair) -> Callable[[], None]:
    """Random numbers on activations that are sharded differ along the axes that cut them, while the pair is in use."""

    def inside(frame: Frame, rest: Call, args: Any, kwargs: Any) -> Any:
        if not frame.is_in_step or frame.trial is not None or pair not in frame.pairs:
            return rest(*args, **kwargs)
        with frame.seeds_at(frame.world.seed_place(frame.rank, pair.row.axes)):
            return rest(*args, **kwargs)

    return around_call(layer, Stage.SEEDS, inside)

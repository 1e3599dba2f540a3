"""Gives each rank of the simulator its own of what the user's code writes in a step.

That is attributes of models, layers, losses, metrics, optimizers and other objects, variables of closures, globals. All
ranks have the one object, and each has its own values on it, as each process has. So it is with what a call of Keras's
own layers writes, and reads again.

A rank that goes on finds them as it has left them. The program, outside of steps, has those of the first rank. What it
changes there is changed for all ranks. What a step has left there of its batch is whole by then, on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from unidist import events
from unidist.backends.torch.sharded import ShardedTensor
from unidist.backends.torch.sharded.nested import replaced, space_of
from unidist.keras.patching.compat import get_keras_mask, set_keras_mask
from unidist.keras.torch import context
from unidist.keras.torch.context import Frame
from unidist.keras.torch.step import reached
from unidist.keras.torch.step.rank_local import PerRankIterator, is_iterator
from unidist.keras.torch.step.writable import content, copied, leaves
from unidist.keras.torch.world import RankWorld

Held = dict[tuple[Any, ...], dict[str, Any]]


class PerRank:
    """The values that the ranks of the simulator have in some places.

    Args:
        world: the ranks. The program has what the first one has.
    """

    def __init__(self, world: RankWorld) -> None:
        self._world = world
        self._places: dict[tuple[Any, ...], reached.Place] = {}
        self._held: dict[int, Held] = {}
        self._left: dict[tuple[Any, ...], dict[str, tuple[Any, ...]]] = {}
        self._kept: Held = {}  # keeps what `_left` knows by its id
        self._shown = world.ranks[0]

    @contextlib.contextmanager
    def apart(self, roots: list[Any]) -> Iterator[None]:
        """Inside the ranks run code that reaches `roots`."""
        if not self._world.runs_several or context.frame() is not None:
            yield
            return
        self._places = {place.key: place for place in reached.places(roots)}
        if not self._places and not any(self._held.values()):
            yield  # Keras's own code alone, which writes nowhere
            return
        self._begin()
        try:
            with self._world.backend.calling_at_turns(self._turn):
                yield
            self._make_whole(roots)
        finally:
            self._turn(self._world.ranks[0])
            self._kept = self._now()
            self._left = {key: {name: content(value) for name, value in own.items()} for key, own in self._kept.items()}

    def _turn(self, rank: int) -> None:
        if rank == self._shown or rank not in self._held:
            return
        self._held[self._shown] = self._now()
        for key, own in self._held[rank].items():
            values, before = self._places[key].values, self._held[self._shown][key]
            for name in before.keys() - own.keys():
                del values[name]
            values.update(own)
        self._shown = rank

    def _begin(self) -> None:
        for place in self._places.values():
            for values, name, _, value in leaves(place.values, place.now()):
                if is_iterator(value):
                    values[name] = PerRankIterator(value)
        now = self._now()
        for rank in self._world.ranks:
            before: Held = self._held.get(rank, {})
            known: dict[int, Any] = {}
            held = self._held[rank] = {key: before.get(key, {}) for key in now}
            for key, own in held.items():
                left = self._left.get(key, {})
                for name in left.keys() - now[key].keys():
                    own.pop(name, None)
                for name, value in now[key].items():
                    if rank == self._shown:
                        own[name] = value
                    elif left.get(name) != content(value):
                        own[name] = copied(value, reached.is_shared, known)

    def _now(self) -> Held:
        return {key: place.now() for key, place in self._places.items()}

    def _make_whole(self, roots: list[Any]) -> None:
        """Replaces what carries rows or features: it does so in its step alone."""
        found: dict[int, dict[Any, Any]] = {}
        for rank in reversed(self._world.ranks):
            self._turn(rank)
            found[rank] = {
                (*place.path, *path): (values, name, value)
                for place in reached.places(roots)
                for values, name, path, value in leaves(place.values, place.now())
                if space_of(value) is not None
            }
        paths = [path for path in found[self._shown] if all(path in own for own in found.values())]
        if not paths:
            return
        wholes: dict[int, list[Any]] = {}

        def on_rank(frame: Frame) -> None:
            with events.for_purpose("kept"):
                wholes[frame.rank] = [replaced(found[frame.rank][path][2], ShardedTensor, _whole) for path in paths]

        self._world.run(on_rank)
        for rank in reversed(self._world.ranks):
            self._turn(rank)
            for path, whole in zip(paths, wholes[rank], strict=True):
                values, name, _ = found[rank][path]
                values[name] = whole


@contextlib.contextmanager
def as_before(roots: list[Any]) -> Iterator[None]:
    """Puts back what code that reaches `roots` writes inside, where it runs on trial."""
    places, known = list(reached.places(roots)), dict[int, Any]()
    before = [(place.values, place.now()) for place in places]
    for values, own in before:
        values.update({name: copied(value, reached.is_shared, known) for name, value in own.items()})
    try:
        yield
    finally:
        for place, (values, own) in zip(places, before, strict=True):
            for name in place.now().keys() - own.keys():
                del values[name]
            values.update(own)


def _whole(x: Any) -> Any:
    """Gathers a value with its gradient: a later step may go back through it."""
    out = x.whole()
    mask = get_keras_mask(x)
    if mask is not None:
        set_keras_mask(out, _whole(mask))
    return out

"""The call of a layer: one wrapper, in which everything that stands before the layer's own call has its place."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
# From the call that stands inside to the one around it.
Link = Callable[[Call], Call]

_CALLS = "_unidist_calls"


class Stage(enum.IntEnum):
    """What may stand before a layer's own call, the outermost first."""

    PLANNED = enum.auto()  # the planner looks at what the layer takes, or answers for it
    HOLDING = enum.auto()  # pairs are in use inside of the layer that has all of them
    SEEDS = enum.auto()  # random numbers differ where a pair's shards do
    PROGRAM = enum.auto()  # the model's call is a program of torch.compile's
    FETCHED = enum.auto()  # stored shards are there while the layer is called
    REGION = enum.auto()  # what may look at several rows sees those of all shards
    ROWS = enum.auto()  # what treats each row alone is called with this shard's rows
    WHOLE = enum.auto()  # a model gives no parts of sequences
    HEADS = enum.auto()  # an attention counts its rank's heads
    RULE = enum.auto()  # a layer computes with shards of its weights
    GIVEN = enum.auto()  # what a layer gives is no view of what was fetched for it


class _Calls:
    """One owner's own call and what stands before it. `head` is the wrapper that the owner has as its `call`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._had_its_own = "call" in vars(owner)
        self._own: Call = owner.call
        self._links: list[tuple[Stage, Link]] = []  # the innermost first
        self._chain = self._own

        @functools.wraps(self._own)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._chain(*args, **kwargs)

        setattr(call, _CALLS, self)
        self.head = call
        object.__setattr__(owner, "call", call)

    def add(self, stage: Stage, link: Link) -> Callable[[], None]:
        entry = (stage, link)
        self._links = sorted([*self._links, entry], key=lambda one: -one[0])
        self._chain = self._linked(self._links)

        def undo() -> None:
            self._links = [one for one in self._links if one is not entry]
            self._chain = self._linked(self._links)
            if not self._links and vars(self._owner).get("call") is self.head:
                self._put_back()

        return undo

    def without(self, stage: Stage) -> Call | None:
        left = [one for one in self._links if one[0] is not stage]
        return self._linked(left) if len(left) < len(self._links) else None

    def _linked(self, links: list[tuple[Stage, Link]]) -> Call:
        return functools.reduce(lambda inner, one: one[1](inner), links, self._own)

    def _put_back(self) -> None:
        if self._had_its_own:
            object.__setattr__(self._owner, "call", self._own)
        else:
            object.__delattr__(self._owner, "call")


def around(owner: Any, stage: Stage, link: Link) -> Callable[[], None]:
    """Lets something stand before the call of a layer, a model or a loss.

    Args:
        owner: what has a method `call`.
        stage: its place among the others. Of two at one stage the later stands outside.
        link: makes the call at this stage of the one inside.

    Returns:
        What takes it off again, also where others have come since. With the last one the owner has its own call.

    Example:
        >>> class Layer:
        ...     def call(self, x):
        ...         return x + 1
        >>> layer = Layer()
        >>> undo = around(layer, Stage.RULE, lambda rest: lambda x: 10 * rest(x))
        >>> _ = around(layer, Stage.FETCHED, lambda rest: lambda x: rest(x) + 0.5)
        >>> layer.call(1)
        20.5
        >>> undo()
        >>> layer.call(1)
        2.5
    """
    calls: _Calls | None = getattr(vars(owner).get("call"), _CALLS, None)
    return (calls or _Calls(owner)).add(stage, link)


def without(call: Call, stage: Stage) -> Call | None:
    """A call of a layer as it is without what stands at a stage; None where nothing stands there."""
    calls: _Calls | None = getattr(call, _CALLS, None)
    return None if calls is None else calls.without(stage)

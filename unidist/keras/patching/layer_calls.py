"""The call of a layer: one wrapper, with a place for everything that stands before the own call.

Keras calls a quantized layer by another method. The same stands before both.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

Call = Callable[..., Any]
# From the call that stands inside to the one around it.
Link = Callable[[Call], Call]

# By which Keras calls a layer: the second where it is quantized.
ENTRANCES = ("call", "quantized_call")
# On a wrapper: its _Entrance.
_ENTRANCE = "_unidist_calls"


class Stage(enum.IntEnum):
    """Orders what may stand before a layer's own call, the outermost first."""

    PLANNED = enum.auto()  # the planner looks at what the layer takes, or answers for it
    BORDER = enum.auto()  # a layer that treats each row alone takes this shard's rows off what carries them
    FETCHED = enum.auto()  # stored shards are there while the layer is called
    REGION = enum.auto()  # what may look at several rows sees those of all shards
    ROWS = enum.auto()  # what treats each row alone is called with this shard's rows
    WHOLE = enum.auto()  # a model gives whole tensors
    SHARED = enum.auto()  # ranks work apart with all that a layer gives
    RULE = enum.auto()  # a layer computes with shards of its weights
    KERNELS = enum.auto()  # a layer of stacked kernels waits for the weights of what it gives
    GIVEN = enum.auto()  # what a layer gives is no view of what was fetched for it


class _Entrance:
    """A method by which Keras calls an owner. `head` is the wrapper that the owner has in its place."""

    def __init__(self, owner: Any, name: str, calls: _Calls) -> None:
        self.calls, self._owner, self._name = calls, owner, name
        self._had_its_own = name in vars(owner)
        self._own: Call = getattr(owner, name)
        self.stand([])

        @functools.wraps(self._own)
        def head(*args: Any, **kwargs: Any) -> Any:
            return self._chain(*args, **kwargs)

        setattr(head, _ENTRANCE, self)
        self._head = head
        object.__setattr__(owner, name, head)

    def stand(self, links: list[tuple[Stage, Link]]) -> None:
        self._links = links
        self._chain = self._linked(links)

    def without(self, stage: Stage) -> Call | None:
        left = [one for one in self._links if one[0] is not stage]
        return self._linked(left) if len(left) < len(self._links) else None

    def _linked(self, links: list[tuple[Stage, Link]]) -> Call:
        return functools.reduce(lambda inner, one: one[1](inner), links, self._own)

    def put_back(self) -> None:
        if vars(self._owner).get(self._name) is not self._head:
            return
        if self._had_its_own:
            object.__setattr__(self._owner, self._name, self._own)
        else:
            object.__delattr__(self._owner, self._name)


class _Calls:
    def __init__(self, owner: Any) -> None:
        self._links: list[tuple[Stage, Link]] = []  # the innermost first
        self._entrances = [_Entrance(owner, name, self) for name in ENTRANCES if hasattr(owner, name)]

    def add(self, stage: Stage, link: Link) -> Callable[[], None]:
        entry = (stage, link)
        self._set(sorted([*self._links, entry], key=lambda one: -one[0]))

        def undo() -> None:
            self._set([one for one in self._links if one is not entry])
            self._leave_unless_needed()

        return undo

    @contextlib.contextmanager
    def bare(self) -> Iterator[None]:
        before = self._links
        self._set([])
        try:
            yield
        finally:
            self._set(before)
            self._leave_unless_needed()

    def _leave_unless_needed(self) -> None:
        if not self._links:
            for entrance in self._entrances:
                entrance.put_back()

    def _set(self, links: list[tuple[Stage, Link]]) -> None:
        self._links = links
        for entrance in self._entrances:
            entrance.stand(links)


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
    entrance: _Entrance | None = getattr(vars(owner).get("call"), _ENTRANCE, None)
    return (_Calls(owner) if entrance is None else entrance.calls).add(stage, link)


@contextlib.contextmanager
def bare(owner: Any) -> Iterator[None]:
    """Inside nothing stands before the call of a layer or a model but what comes inside, and goes with it."""
    entrance: _Entrance | None = getattr(vars(owner).get("call"), _ENTRANCE, None)
    with (_Calls(owner) if entrance is None else entrance.calls).bare():
        yield


def without(call: Call, stage: Stage) -> Call | None:
    """A call of a layer as it is without what stands at a stage; None where nothing stands there."""
    entrance: _Entrance | None = getattr(call, _ENTRANCE, None)
    return None if entrance is None else entrance.without(stage)

"""Where unidist steps into Keras: attributes that it replaces, all of a table or none, and puts back.

A table is the only way in which unidist replaces an attribute for longer than a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from unidist.keras.compat import READ, missing, nearest

_ABSENT = object()


@dataclass(frozen=True)
class Hook:
    """An attribute of a framework that unidist replaces.

    Attributes:
        owner: the class or module that has it.
        name: its name there.
        make: is given what is there and returns what takes its place.
        why: what for, in a few words.
        versions: of Keras, that have it, of those that unidist was made for; with another one it is left out.
        imported: whether modules that imported it by its name get the replacement too.
        adds: whether the framework may lack it.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    why: str
    versions: tuple[str, ...] = READ
    imported: bool = False
    adds: bool = False

    @property
    def where(self) -> str:
        """The attribute in words: its module, class and name."""
        module = getattr(self.owner, "__module__", None)
        name = getattr(self.owner, "__qualname__", getattr(self.owner, "__name__", repr(self.owner)))
        return ".".join(filter(None, (module, name, self.name)))


class _Replaced:
    """One attribute while its hook is on."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self._before = vars(hook.owner).get(hook.name, _ABSENT)  # absent where a base class has it
        original = getattr(hook.owner, hook.name, None)
        self._ours = hook.make(original)
        setattr(hook.owner, hook.name, self._ours)
        self._original = original
        if hook.imported:
            _rename(hook.name, original, self._ours)

    @property
    def is_on_top(self) -> bool:
        """Whether nobody has replaced the attribute after unidist."""
        return vars(self.hook.owner).get(self.hook.name) is self._ours

    def undo(self) -> None:
        if self._before is _ABSENT:
            delattr(self.hook.owner, self.hook.name)
        else:
            setattr(self.hook.owner, self.hook.name, self._before)
        if self.hook.imported:
            _rename(self.hook.name, self._ours, self._original)


def _rename(name: str, found: Any, replacement: Any) -> None:
    """In every module that has the one under this name the other takes its place."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is found:
            module.__dict__[name] = replacement


class Table:
    """Hooks that are on together, or not at all.

    Args:
        hooks: in the order in which they are put on: a later one may wrap an earlier one's.

    Example:
        >>> from types import SimpleNamespace
        >>> from unidist.keras.interception import Hook, Table
        >>> class Framework:
        ...     def step(self) -> int:
        ...         return 1
        >>> def doubled(original):
        ...     return lambda self: 2 * original(self)
        >>> table = Table([Hook(Framework, "step", doubled, "an example")])
        >>> table.turn_on(); Framework().step()
        2
        >>> table.turn_off(); Framework().step()
        1
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self.hooks = tuple(hooks)
        self._on: list[_Replaced] = []

    @property
    def replaced(self) -> tuple[Hook, ...]:
        """The hooks that are on."""
        return tuple(one.hook for one in self._on)

    def turn_on(self) -> None:
        """Replaces every attribute of the table. Those that are replaced already stay as they are.

        Raises:
            BackendMismatchError: this Keras lacks one, so it is not one that unidist was made for. Nothing is replaced.
        """
        held = {id(one.hook) for one in self._on}
        wanted = [hook for hook in self.hooks if id(hook) not in held and nearest() in hook.versions]
        if absent := [hook.where for hook in wanted if not hook.adds and not hasattr(hook.owner, hook.name)]:
            raise missing(", ".join(absent))
        known = len(self._on)
        try:
            for hook in wanted:
                self._on.append(_Replaced(hook))
        except BaseException:
            self._take_off(self._on[known:])
            raise

    def turn_off(self) -> None:
        """Puts back what was there. An attribute that another library has replaced since then stays as it is: what
        stands under it does nothing while no model is distributed."""
        self._take_off(self._on)

    def _take_off(self, some: list[_Replaced]) -> None:
        for one in reversed(some.copy()):
            if one.is_on_top:
                one.undo()
                self._on.remove(one)


def by(replacement: Any) -> Callable[[Any], Any]:
    """For `Hook.make`: a replacement that does not ask for the original."""
    return lambda original: replacement


def kept(originals: dict[str, Any], name: str, replacement: Any) -> Callable[[Any], Any]:
    """For `Hook.make`: a replacement that finds the original in a dictionary, under a name."""

    def make(original: Any) -> Any:
        originals[name] = original
        return replacement

    return make

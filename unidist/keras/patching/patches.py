"""Says where unidist steps into Keras: attributes that it replaces, and puts back.

A table is the only way in which unidist replaces an attribute for longer than a call. The tables of the drivers leave
out what a newer framework lacks or has in another shape. Such a hook is lost: it is reported once, and a model that
needs it is refused by name (`check`).
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from unidist.backends import registry
from unidist.errors import BackendMismatchError, CapabilityError
from unidist.keras.patching.compat import READ, missing, nearest

_ABSENT = object()
# Whatever a framework of another version may answer where it is asked for an attribute that has moved or changed.
_FOREIGN = (ImportError, AttributeError, TypeError, KeyError, ValueError, BackendMismatchError)


def every_model(model: Any) -> bool:
    """For `Hook.needed`: no model can be distributed without the hook."""
    return True


def no_model(model: Any) -> bool:
    """For `Hook.needed`: the hook saves memory or time, and no number depends on it."""
    return False


@dataclass(frozen=True)
class Hook:
    """An attribute of a framework that unidist replaces.

    Attributes:
        owner: the class or module that has it, or its place as "module:name" where a framework may lack it ("module:"
            is the module itself).
        name: its name there.
        make: is given what is there and returns what takes its place.
        why: what for, in a few words.
        versions: of Keras, that have it, of those that unidist was made for; with another one it is left out.
        imported: whether modules that imported it by its name get the replacement too.
        adds: whether the framework may lack it.
        needed: whether a model must be refused where the hook is lost. It is asked with None where no model is known
            yet: then only what every model needs says yes.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    why: str
    versions: tuple[str, ...] = READ
    imported: bool = False
    adds: bool = False
    needed: Callable[[Any], bool] = every_model

    @property
    def where(self) -> str:
        """The attribute in words: its module, class and name."""
        if isinstance(self.owner, str):
            return f"{self.owner.strip(':').replace(':', '.')}.{self.name}"
        module = getattr(self.owner, "__module__", None)
        name = getattr(self.owner, "__qualname__", getattr(self.owner, "__name__", repr(self.owner)))
        return ".".join(filter(None, (module, name, self.name)))

    def found(self) -> Any:
        """The class or module that has the attribute.

        Raises:
            ImportError, AttributeError: the framework has no such place.
        """
        if not isinstance(self.owner, str):
            return self.owner
        module, _, path = self.owner.partition(":")
        found = importlib.import_module(module)
        return operator.attrgetter(path)(found) if path else found


@dataclass(frozen=True)
class Lost:
    """A hook that could not be put on.

    Attributes:
        where: the attribute.
        why: what the hook is for.
        found: what stood in the way.
        needed: as of the hook.
    """

    where: str
    why: str
    found: str
    needed: Callable[[Any], bool] = every_model

    def __str__(self) -> str:
        framework = self.where.partition(".")[0]
        return (
            f"unidist could not replace {self.where} ({self.why}) in {framework} {_version(framework)}: {self.found}. "
            f"unidist was tested with {framework} {', '.join(tested(framework))}"
        )


def tested(framework: str) -> tuple[str, ...]:
    """The versions of Keras or of a framework that unidist was tested with, the oldest first."""
    return READ if framework == "keras" else registry.tested(framework)


def _version(framework: str) -> str:
    found = getattr(sys.modules.get(framework), "__version__", None)
    return str(found or registry.version_of(framework) or "of an unknown version")


class _Replaced:
    """One attribute while its hook is on."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self._owner = hook.found()
        self._before = vars(self._owner).get(hook.name, _ABSENT)  # absent where a base class has it
        original = getattr(self._owner, hook.name, None)
        if original is None and not hook.adds and self._before is _ABSENT:
            raise AttributeError("it is not there")
        self._ours = hook.make(original)
        if original is not None and _kind(original) != _kind(self._ours):
            raise TypeError(f"it is a {_kind(original)} there, and unidist was made for a {_kind(self._ours)}")
        setattr(self._owner, hook.name, self._ours)
        self._original = original

    @property
    def is_on_top(self) -> bool:
        """Is true where nobody has replaced the attribute after unidist."""
        return vars(self._owner).get(self.hook.name) is self._ours

    def undo(self) -> None:
        if self._before is _ABSENT:
            delattr(self._owner, self.hook.name)
        else:
            setattr(self._owner, self.hook.name, self._before)

    def renamed(self, *, back: bool = False) -> tuple[str, Any, Any]:
        """The attribute's name, what other modules have imported under it, and what takes the place of that."""
        change = self._original, self._ours
        return (self.hook.name, *(reversed(change) if back else change))


def _kind(value: Any) -> str:
    if isinstance(value, property):
        return "property"
    return "function" if callable(value) or isinstance(value, classmethod | staticmethod) else "value"


def _rename(changes: Iterable[tuple[str, Any, Any]]) -> None:
    """Replaces what modules have imported under a name, in one walk through all modules."""
    by_name: dict[str, list[tuple[Any, Any]]] = {}
    for name, found, replacement in changes:
        by_name.setdefault(name, []).append((found, replacement))
    for module in list(sys.modules.values()) if by_name else ():
        names: dict[str, Any] = getattr(module, "__dict__", {})
        for name in by_name.keys() & names.keys():
            for found, replacement in by_name[name]:
                if names[name] is found:
                    names[name] = replacement


class Table:
    """Hooks that are on together, or not at all.

    Args:
        hooks: in the order in which they are put on: a later one may wrap an earlier one's.

    Example:
        >>> from types import SimpleNamespace
        >>> from unidist.keras.patching.patches import Hook, Table
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
        self.lost: tuple[Lost, ...] = ()
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
        known = len(self._on)
        if absent := [hook.where for hook in self._wanted() if not hook.adds and not hasattr(hook.owner, hook.name)]:
            raise missing(", ".join(absent))
        try:
            for hook in self._wanted():
                self._on.append(_Replaced(hook))
        except BaseException:
            self._take_off(self._on[known:])
            raise
        self._rename_from(known)

    def turn_on_all_there_are(self) -> None:
        """Replaces every attribute of the table that the frameworks have as unidist knows it.

        The others are `lost`, with a warning for each.
        """
        lost, known = [], len(self._on)
        for hook in self._wanted():
            try:
                self._on.append(_Replaced(hook))
            except _FOREIGN as error:
                lost.append(Lost(hook.where, hook.why, _in_words(error), hook.needed))
        self._rename_from(known)
        self._lose(lost)

    def lose(self, where: str, error: Exception) -> None:
        """Notes that a module of the framework is unknown to unidist, so that its models stay on one device."""
        self._lose([Lost(where, "its models are trained on several devices", _in_words(error))])

    def turn_off(self) -> None:
        """Puts back what was there.

        An attribute that another library has replaced since then stays as it is: what stands under it does nothing
        while no model is distributed.
        """
        self._take_off(self._on)
        self.lost = ()
        if self in _with_lost:
            _with_lost.remove(self)

    def _wanted(self) -> list[Hook]:
        held = {id(one.hook) for one in self._on}
        return [hook for hook in self.hooks if id(hook) not in held and nearest() in hook.versions]

    def _lose(self, lost: list[Lost]) -> None:
        for one in lost:
            if str(one) not in _reported:
                _reported.add(str(one))
                warnings.warn(f"{one}. Models that need it are refused", UserWarning, stacklevel=3)
        self.lost = tuple(lost)
        if lost and self not in _with_lost:
            _with_lost.append(self)

    def _rename_from(self, known: int) -> None:
        _rename(one.renamed() for one in self._on[known:] if one.hook.imported)

    def _take_off(self, some: list[_Replaced]) -> None:
        gone = []
        for one in reversed(some.copy()):
            if one.is_on_top:
                one.undo()
                self._on.remove(one)
                gone.append(one)
        _rename(one.renamed(back=True) for one in gone if one.hook.imported)


# Tables that are on without all of their hooks, and what was said about them.
_with_lost: list[Table] = []
_reported: set[str] = set()


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, BackendMismatchError) else str(error)


def lost() -> tuple[Lost, ...]:
    """The hooks that could not be put on."""
    return tuple(one for table in _with_lost for one in table.lost)


def check(model: Any = None, in_own_loop: bool = False) -> None:
    """Refuses to distribute a model that needs a hook which is lost.

    Without a model: where a hook is lost that every model needs.

    Args:
        in_own_loop: a training loop of the user's own may call whatever there is, so it needs every hook.

    Raises:
        CapabilityError: it names the hook and the versions that have it.
    """
    for one in lost():
        if one.needed(model) or (in_own_loop and one.needed is not no_model):
            whose = "no model can" if model is None else f"model {model.name!r} cannot"
            raise CapabilityError(f"{whose} be distributed: {one}: install one of these")


def by(replacement: Any) -> Callable[[Any], Any]:
    """For `Hook.make`: a replacement that does not ask for the original."""
    return lambda original: replacement


def calling(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """For `Hook.make`: a replacement that calls a function with the original, and then its own arguments."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return make

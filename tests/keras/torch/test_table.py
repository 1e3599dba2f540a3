"""The table of hooks: all of them are on or none is, and each is put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from unidist.errors import BackendMismatchError
from unidist.keras.patching.patches import Hook, Table, by, calling


class Base:
    def inherited(self) -> str:
        return "inherited"


class Framework(Base):
    def step(self) -> str:
        return "step"

    @property
    def size(self) -> int:
        return 1


def behind(word: str) -> Callable[[Any], Any]:
    return lambda original: lambda self: f"{original(self)} {word}"


def hook(name: str, make: Callable[[Any], Any], **options: Any) -> Hook:
    return Hook(Framework, name, make, "a test", **options)


@pytest.fixture(autouse=True)
def framework_stays() -> Any:
    before = dict(vars(Framework))
    yield
    assert dict(vars(Framework)) == before


def test_later_hooks_wrap_earlier_ones_and_all_are_put_back() -> None:
    table = Table([hook("step", behind("one")), hook("step", behind("two")), hook("inherited", behind("one"))])
    table.turn_on()
    assert (Framework().step(), Framework().inherited()) == ("step one two", "inherited one")
    assert Base().inherited() == "inherited"
    assert table.replaced == table.hooks
    table.turn_on()
    assert Framework().step() == "step one two"
    table.turn_off()
    assert table.replaced == ()
    assert (Framework().step(), Framework().inherited()) == ("step", "inherited")


def test_properties_and_functions_that_are_given_the_original() -> None:
    table = Table(
        [
            hook("size", lambda original: property(lambda self: original.__get__(self) + 1)),
            hook("step", calling(lambda original, self: f"not {original(self)}")),
        ]
    )
    table.turn_on()
    assert (Framework().size, Framework().step()) == (2, "not step")
    table.turn_off()
    assert (Framework().size, Framework().step()) == (1, "step")


def test_nothing_is_replaced_where_one_is_missing() -> None:
    table = Table([hook("step", behind("one")), hook("nothing", behind("one")), hook("neither", behind("one"))])
    with pytest.raises(BackendMismatchError, match=r"Framework\.nothing, .*Framework\.neither, .*install keras 3\.15"):
        table.turn_on()
    assert Framework().step() == "step"
    assert table.replaced == ()


def test_nothing_stays_replaced_where_one_fails() -> None:
    def fails(original: Any) -> Any:
        raise OSError("no room")

    table = Table([hook("step", behind("one")), hook("inherited", fails)])
    with pytest.raises(OSError, match="no room"):
        table.turn_on()
    assert Framework().step() == "step"
    assert table.replaced == ()


def test_what_a_version_lacks_is_left_out() -> None:
    table = Table([hook("step", behind("one"), versions=()), hook("new", by(lambda self: "new"), adds=True)])
    table.turn_on()
    assert Framework().step() == "step"
    assert Framework().new() == "new"  # type: ignore[attr-defined]
    table.turn_off()


def test_modules_that_imported_a_name_have_the_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, importer, other = ModuleType("owner"), ModuleType("importer"), ModuleType("other")
    original = owner.save = importer.save = lambda: "original"  # type: ignore[attr-defined]
    other.save = another = lambda: "another"  # type: ignore[attr-defined]
    for module in (owner, importer, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    table = Table([Hook(owner, "save", by(lambda: "ours"), "a test", imported=True)])
    table.turn_on()
    late = ModuleType("late")
    late.save = owner.save  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late", late)
    assert (owner.save(), importer.save(), other.save()) == ("ours", "ours", "another")
    table.turn_off()
    assert owner.save is importer.save is late.save is original
    assert other.save is another


def test_what_somebody_else_has_wrapped_stays_and_is_not_wrapped_twice() -> None:
    before = Framework.step
    table = Table([hook("step", behind("one")), hook("inherited", behind("one"))])
    table.turn_on()
    ours = Framework.step
    Framework.step = lambda self: f"{ours(self)} else's"  # type: ignore[method-assign]
    try:
        table.turn_off()
        assert Framework().inherited() == "inherited"
        assert [one.name for one in table.replaced] == ["step"]
        table.turn_on()
        assert Framework().step() == "step one else's"
        assert Framework().inherited() == "inherited one"
        Framework.step = ours  # type: ignore[method-assign]
        table.turn_off()
        assert table.replaced == ()
        assert Framework.step is before
    finally:
        Framework.step = before  # type: ignore[method-assign]

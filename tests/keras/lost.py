"""Attributes of frameworks that are gone, or of another kind, while unidist puts its hooks on."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest

import unidist
from unidist.errors import CapabilityError
from unidist.keras import driver, hooks
from unidist.keras.patching import compat, patches
from unidist.keras.patching.patches import Hook

X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
Y = X[:, :1] * 2
# What takes an attribute's place.
KINDS: dict[str, Any] = {"gone": None, "a number": 7}
TRAINS, FAILS_ALONE = "trains", "fails without unidist"


def every() -> list[Hook]:
    """The hooks of all drivers and of the one in use, none twice; those for another Keras left out."""
    found = driver.current()
    assert found is not None
    listed = (*hooks.table().hooks, *found.table().hooks)
    return list(dict.fromkeys(hook for hook in listed if compat.nearest() in hook.versions))


def cases() -> list[tuple[int, str]]:
    """(the number of a hook, what takes its attribute's place)"""
    return [(k, kind) for k, hook in enumerate(every()) for kind in KINDS if not (hook.adds and kind == "gone")]


def trained(distribution: Any = None) -> list[Any]:
    keras.utils.set_random_seed(3)
    with distribution.scope() if distribution is not None else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(X, Y, batch_size=5, verbose=0)
    return [np.asarray(v) for v in model.trainable_variables]


@contextlib.contextmanager
def without(hook: Hook, kind: str) -> Iterator[list[str]]:
    """The attribute is gone or another while the hooks are put on; gives what was warned of."""
    adapter = unidist.backend()
    again = adapter.name, len(adapter.list_devices())
    hooks.remove()
    owner = hook.found()
    kinds = owner.__mro__ if isinstance(owner, type) else (owner, *type(owner).__mro__)
    home = next((one for one in kinds if hook.name in vars(one) and one is not object), owner)
    was_there, before = hook.name in vars(home), vars(home).get(hook.name)
    patches._reported.clear()
    try:
        if kind == "gone":
            delattr(home, hook.name)
        else:
            setattr(home, hook.name, KINDS[kind])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            unidist.use(again[0], devices=again[1])
        yield [str(one.message) for one in caught]
    finally:
        hooks.remove()
        if was_there:
            setattr(home, hook.name, before)
        else:
            delattr(home, hook.name)
        unidist.use(again[0], devices=again[1])


def _alike(hook: Hook) -> list[str]:
    """Where this hook is, and those that lose their attribute with it: of other objects of its owner's class."""
    owner = hook.found()
    if isinstance(owner, type | ModuleType):
        return [hook.where]
    named = [one for one in every() if one.name == hook.name]
    return [one.where for one in named if type(one.found()) is type(owner)]


def outcome(hook: Hook, kind: str) -> str:
    """Whether a model trains as on one device, or why it does not."""
    alike = _alike(hook)
    with without(hook, kind) as said:
        if not patches.lost():
            assert said == []
        else:
            lost = [next((where for where in alike if re.search(re.escape(where) + " ", text)), None) for text in said]
            assert hook.where in lost
            assert None not in lost
        try:
            found = trained(unidist.DataParallel())
        except CapabilityError as error:
            return f"refused: {error}"
        except Exception:
            # Without the attribute Keras or its framework may not train at all, on one device either.
            hooks.remove()
            with pytest.raises(Exception):  # noqa: B017, PT011 - whichever
                trained()
            return FAILS_ALONE
        hooks.remove()
        same(found, trained())
        return TRAINS


def check(hook: Hook, kind: str) -> None:
    """Raises where a model neither trains nor is refused by the attribute's name."""
    found = outcome(hook, kind)
    assert found in (TRAINS, FAILS_ALONE) or hook.where in found
    assert hook.needed is not patches.no_model or not found.startswith("refused")


def check_all(backend: str, numbers: list[int] | None) -> list[str]:
    """In a process of its own: so many cases, or those of these numbers; gives what failed, and the count behind."""
    unidist.use(backend, devices=2)
    listed, failed = every(), []
    chosen = cases() if numbers is None else [cases()[k % len(cases())] for k in numbers]
    for k, kind in chosen:
        try:
            check(listed[k], kind)
        except Exception as error:
            failed.append(f"{listed[k].where} {kind}: {type(error).__name__}: {error}")
    return [*failed, f"{len(chosen)} tried"]


def same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)

"""What unidist adds to Keras, and takes off again: hooks for all, and those of the driver that serves what is in use.

Which attributes they are, and why, is in the tables: `table` here, and `table` in the `hooks` of each driver's package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import keras

from unidist.backends import registry
from unidist.keras import clearing, files, loading, making, placed, sessions
from unidist.keras.interception import Hook, Table

_DRIVERS = {
    "torch": "unidist.keras.explicit",
    "jax": "unidist.keras.partitioned",
    "tensorflow": "unidist.keras.dtensor",
}
# Keras backends that another backend of unidist serves by another driver.
_DRIVERS_OF = {("tensorflow", "horovod"): "unidist.keras.replicated"}
# Those whose hooks have been on.
_used: set[str] = set()


def driver() -> str | None:
    """The package of the driver for the Keras backend that runs and the backend in use; None where there is none."""
    name = keras.config.backend()
    used = registry.current().name if registry.has_current() else ""
    return _DRIVERS_OF.get((name, used)) or _DRIVERS.get(name)


@cache
def table() -> Table:
    """Whatever the Keras backend."""
    every = (loading, making, clearing, files, placed, sessions)
    return Table(hook for module in every for hook in module.hooks())


@cache
def _table_of(package: str) -> Table:
    make: Callable[[], Table] = importlib.import_module(f"{package}.hooks").table
    return make()


def install() -> None:
    """Turns on the hooks of all and of this driver, once, and those of any other off.

    Raises:
        BackendMismatchError: a Keras that unidist was not made for, or its framework runs with other devices already.
    """
    found = driver()
    for other in _used - {found}:
        _table_of(other).turn_off()
    table().turn_on()
    if found is not None:
        importlib.import_module(f"{found}.hooks").prepare()
        _used.add(found)
        _table_of(found).turn_on()


def remove() -> None:
    """Puts back every attribute that unidist has replaced. Models that are distributed cannot be trained until the
    hooks are on again."""
    for package in sorted(_used):
        _table_of(package).turn_off()
        importlib.import_module(f"{package}.hooks").leave()
    table().turn_off()


def replaced() -> tuple[Hook, ...]:
    """The hooks that are on, in the order in which they were put on."""
    drivers = (hook for package in sorted(_used) for hook in _table_of(package).replaced)
    return (*table().replaced, *drivers)


def align_seeds() -> None:
    """Lets all processes draw the same implicit seeds from here on: rank 0's."""
    if (found := driver()) is not None:
        importlib.import_module(f"{found}.hooks").align_seeds()

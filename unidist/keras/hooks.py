"""What unidist adds to Keras, and takes off again: hooks for all, and those of the driver that serves what is in use.

Which attributes they are, and why, is in the tables: `table` here, and `table` in the `hooks` of each driver's package.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache

import keras

from unidist.backends import registry
from unidist.keras import clearing, files, loading, making
from unidist.keras.interception import Hook, Table
from unidist.planner.layout_map import LayoutMap
from unidist.strategies import Strategy

_log = logging.getLogger(__name__)

# Keras backend -> what trains there, unless the adapter in use has declared another driver.
_DRIVERS = {
    "torch": "unidist.keras.explicit",
    "jax": "unidist.keras.partitioned",
    "tensorflow": "unidist.keras.dtensor",
}
# Those whose hooks have been on.
_used: set[str] = set()


def driver() -> str | None:
    """The package of the driver for the Keras backend that runs and the backend in use; None where there is none."""
    name = keras.config.backend()
    return registry.in_use().drivers.get(name) or _DRIVERS.get(name)


@cache
def table() -> Table:
    """Whatever the Keras backend."""
    return Table((*loading.hooks(), *making.hooks(), *clearing.hooks(), *files.hooks()))


@cache
def _table_of(package: str) -> Table:
    make: Callable[[], Table] = importlib.import_module(f"{package}.hooks").table
    return make()


def install() -> None:
    """Turns on the hooks of all and of this driver, once, and those of any other off.

    Raises:
        BackendMismatchError: a Keras that unidist was not made for, or its framework runs with other devices already.
    """
    found, before = driver(), len(replaced())
    for other in _used - {found}:
        _table_of(other).turn_off()
    table().turn_on()
    if found is not None:
        importlib.import_module(f"{found}.hooks").prepare()
        _used.add(found)
        _table_of(found).turn_on()
    if len(replaced()) != before:
        _log.debug("hooks on: %d attributes of Keras on %r replaced", len(replaced()), keras.config.backend())


def remove() -> None:
    """Puts back every attribute that unidist has replaced. Models that are distributed cannot be trained until the
    hooks are on again."""
    before = len(replaced())
    for package in sorted(_used):
        _table_of(package).turn_off()
        importlib.import_module(f"{package}.hooks").leave()
    table().turn_off()
    _log.debug("hooks off: %d attributes put back", before - len(replaced()))


def replaced() -> tuple[Hook, ...]:
    """The hooks that are on, in the order in which they were put on."""
    drivers = (hook for package in sorted(_used) for hook in _table_of(package).replaced)
    return (*table().replaced, *drivers)


def check(strategy: Strategy, layout_map: LayoutMap | None) -> None:
    """Raises MeshError or CapabilityError where the driver cannot train by a strategy."""
    if (found := driver()) is not None:
        importlib.import_module(f"{found}.hooks").check(strategy, layout_map)


def align_seeds() -> None:
    """Lets all processes draw the same implicit seeds from here on: rank 0's."""
    if (found := driver()) is not None:
        importlib.import_module(f"{found}.hooks").align_seeds()

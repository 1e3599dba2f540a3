"""What unidist adds to Keras, and takes off again: hooks for all, and those of the driver that serves what is in use.

Which attributes they are, and why, is in the tables: `table` here, and `table` in the `hooks` of each driver's package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import keras

from unidist.keras import clearing, files, following, loading, making, phases, placed, ranges, sessions
from unidist.keras.drivers import driver, hooks_of
from unidist.keras.interception import Hook, Table

_log = logging.getLogger(__name__)

# Those whose hooks have been on.
_used: set[str] = set()


@cache
def table() -> Table:
    """Whatever the Keras backend."""
    every = (loading, making, clearing, files, ranges, placed, sessions, following, phases)
    return Table(hook for module in every for hook in module.hooks())


@cache
def _table_of(package: str) -> Table:
    make: Callable[[], Table] = hooks_of(package).table
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
        hooks_of(found).prepare()
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
        hooks_of(package).leave()
    table().turn_off()
    _log.debug("hooks off: %d attributes put back", before - len(replaced()))


def replaced() -> tuple[Hook, ...]:
    """The hooks that are on, in the order in which they were put on."""
    drivers = (hook for package in sorted(_used) for hook in _table_of(package).replaced)
    return (*table().replaced, *drivers)

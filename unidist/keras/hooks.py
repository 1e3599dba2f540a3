"""The hooks that unidist adds to Keras, and takes off again: for all, and of the driver in use.

Which attributes they are, and why, is in the tables: `table` here, and `table` of each driver.
"""

from __future__ import annotations

import logging
import sys
from functools import cache

import keras

from unidist.backends import registry
from unidist.keras import (
    active_distribution,
    atomic_files,
    driver,
    fit_observer,
    lazy_values,
    model_config,
    seeds,
    writers,
)
from unidist.keras.patching.compat import READ
from unidist.keras.patching.patches import Hook, Table
from unidist.keras.records import model_record, variable_record

_log = logging.getLogger(__name__)

# Those whose hooks have been on.
_used: set[str] = set()


@cache
def table() -> Table:
    """Whatever the Keras backend."""
    every = (
        model_config,
        active_distribution,
        atomic_files,
        lazy_values,
        variable_record,
        model_record,
        fit_observer,
        writers,
    )
    return Table(hook for module in every for hook in module.hooks())


@cache
def _table_of_hub() -> Table:
    return Table(writers.hooks_of_hub())


@cache
def _table_of(package: str) -> Table:
    return driver.of(package).table()


def install() -> None:
    """Turns on the hooks of all and of this driver, once, and those of any other off.

    keras_hub's are turned on where it is imported.

    Raises:
        BackendMismatchError: a Keras that unidist was not made for, or its framework runs with other devices already.
    """
    _say_untested()
    found, before = driver.package(), len(replaced())
    for other in _used - {found}:
        _table_of(other).turn_off()
    table().turn_on_all_there_are()
    if writers.has_hub():
        _table_of_hub().turn_on_all_there_are()
    if found is not None:
        try:
            driver.of(found).prepare()
            _table_of(found).turn_on_all_there_are()
            _used.add(found)
        except (ImportError, AttributeError, TypeError) as error:
            table().lose(f"{keras.config.backend()}'s driver", error)
    if len(replaced()) != before:
        _log.debug("hooks on: %d attributes of Keras on %r replaced", len(replaced()), keras.config.backend())


@cache
def _say_untested() -> None:
    if registry.is_newer(keras.__version__, READ):
        print(
            f"unidist: keras {keras.__version__} is newer than the versions that unidist was tested with: "
            f"{', '.join(READ)}",
            file=sys.stderr,
        )


def remove() -> None:
    """Puts back every attribute that unidist has replaced.

    Models that are distributed cannot be trained until the hooks are on again.
    """
    before = len(replaced())
    if _used:
        seeds.leave()
    for package in sorted(_used):
        _table_of(package).turn_off()
        driver.of(package).leave()
    if writers.has_hub():
        _table_of_hub().turn_off()
    table().turn_off()
    _log.debug("hooks off: %d attributes put back", before - len(replaced()))


def replaced() -> tuple[Hook, ...]:
    """The hooks that are on, in the order in which they were put on."""
    of_drivers = (hook for package in sorted(_used) for hook in _table_of(package).replaced)
    hub = _table_of_hub().replaced if writers.has_hub() else ()
    return (*table().replaced, *hub, *of_drivers)

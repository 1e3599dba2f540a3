"""Runs a program on one device or under a strategy. The programs know nothing of either."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import keras

import unidist
from tests.support.clearing import cleared

STRATEGIES = {
    "data": lambda: unidist.DataParallel(),
    "zero": lambda: unidist.DataParallel(zero=3),
    "found": lambda: unidist.ModelParallel(),
}


def trained(program: str, kind: str | None) -> dict[str, Any]:
    """What `program` ("module" or "module:function") gives, and what was sent; None: on one device."""
    module, _, function = program.partition(":")
    run = getattr(importlib.import_module(f"tests.scripts.{module}"), function or "run")
    cleared()
    keras.utils.set_random_seed(7)
    scope = contextlib.nullcontext() if kind is None else STRATEGIES[kind]().scope()
    with scope, unidist.ledger() as book:
        told = run()
    return {"told": told, "ops": sorted({event.op for event in book.events})}

"""Mistakes planted in the engine, in the process of a test: the tests must notice each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from unidist.keras.consistency.processes import Processes
from unidist.keras.jax import data, layouts
from unidist.keras.records import model_record, variable_record

MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "padding counts as rows": (data.Padded, "cut", lambda self: self.array),
    "nothing is distributed outside of the scope": (model_record, "distribution_of", lambda model: None),
    "slots stay behind": (variable_record, "owner_of", lambda variable: None),
    "every device computes the whole batch": (
        layouts,
        "of_batch",
        lambda shape, distribution: layouts.replicated(distribution),
    ),
    "seeds differ by process": (Processes, "align_seeds", lambda self: None),
}


def run_with(mistake: str, program: str, *args: Any) -> Any:
    """What a program of programs.py or behaviours.py ("module:function") gives with the mistake in place."""
    owner, name, broken = MISTAKES[mistake]
    module, _, function = program.partition(":")
    with mock.patch.object(owner, name, broken):
        return getattr(importlib.import_module(module), function)(*args)

"""Runs the programs of promises with `jit_compile=True` on torch: each step but the first is a program alone."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import torch

from tests.support.runs import Result
from unidist.keras.torch import engine
from unidist.keras.torch.step import whole_steps

_compile = keras.Model.compile


def _compiled(self: Any, *args: Any, **kwargs: Any) -> None:
    _compile(self, *args, **{**kwargs, "jit_compile": True})


@contextlib.contextmanager
def by_programs() -> Iterator[list[whole_steps.WholeSteps]]:
    """Inside, models run as programs, as they are traced and beside no step; gives their programs."""
    made: list[whole_steps.WholeSteps] = []

    class Steps(whole_steps.WholeSteps):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

        def _proven(self, frame: Any, program: Any, given: Any, batch: Any, waiting: Any, eagerly: Any) -> Any:
            return self._run(program, given, waiting), ""

    with (
        mock.patch.object(keras.Model, "compile", _compiled),
        mock.patch.object(torch, "compile", lambda graph, **_: graph),
        mock.patch.object(engine, "WholeSteps", Steps),
    ):
        yield made


def run(program: str | Callable[..., Result], kind: str | None, zero: int, *args: Any) -> Result:
    """What a program ("module:function") gives, with why its steps are none, and how many programs it had."""
    if isinstance(program, str):
        module, name = program.split(":")
        program = getattr(importlib.import_module(module), name)
    with by_programs() as made:
        found = program(kind, zero, *args)
    why = [f"{step}: {said}" for steps in made for step, said in steps.why.items()]
    return {**found, "_unfit": why, "_programs": sum(steps.compiled for steps in made)}

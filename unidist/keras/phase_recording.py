"""Phases: what of a training the main thread is in, noted in this process's record (unidist.flight)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from unidist.flight.recorder import recorder
from unidist.keras import fit_observer
from unidist.keras.patching.compat import CallbackList
from unidist.keras.patching.patches import Hook, calling


def hooks() -> Iterator[Hook]:
    trainer = fit_observer.trainer()
    if trainer is None:
        return
    why = "what a process is at can be seen from outside"
    for name, phase in (("fit", "program"), ("evaluate", "evaluating"), ("predict", "evaluating")):
        yield Hook(trainer, name, functools.partial(_within, phase), why)
    yield Hook(CallbackList, "on_train_batch_begin", _step_begins, why)
    yield Hook(CallbackList, "on_train_batch_end", _step_ends, why)


def _within(phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def entrance(*args: Any, **kwargs: Any) -> Any:
        with recorder.phase(phase):
            return original(*args, **kwargs)

    return entrance


@calling
def _step_begins(original: Any, self: Any, batch: int, logs: Any = None) -> None:
    original(self, batch, logs)
    recorder.step_begins()


@calling
def _step_ends(original: Any, self: Any, batch: int, logs: Any = None) -> None:
    recorder.stepped()
    recorder.enter("program")
    original(self, batch, logs)
    recorder.enter("data")

"""Rematerialization: a layer computes in backward what it computed before, and writes nothing twice.

Backward may run in another thread (autograd has one for each accelerator), outside of any layer, and after other calls
have drawn random numbers. So the recomputation gets the frame and Keras's thread-local state of its call, and reads
each variable that the call wrote as it was before.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.checkpoint import set_checkpoint_early_stop

from unidist.keras.needs import recomputes
from unidist.keras.patching.compat import StatelessScope, get_stateless_scope, global_state
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.torch import carrying, context
from unidist.keras.torch.context import Before, Frame
from unidist.keras.torch.params import saved
from unidist.keras.torch.world import keras_state, restore_keras_state

# What torch's checkpoint takes for itself; all else is the function's.
_OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")


def hooks() -> tuple[Hook, ...]:
    """torch's checkpoint, which Keras's remat calls too; without a frame it is as before."""
    why = "recomputation is the call over again"
    # A layer of the user's own may call it, and may have imported it by its name.
    return (Hook("torch.utils.checkpoint:", "checkpoint", calling(_again), why, imported=True, needed=recomputes),)


def _again(original: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function so that its recomputation is the call over again."""
    frame = context.frame()
    if frame is None or context.infers_shapes():
        return original(function, *args, **kwargs)
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    (args, kwargs), put_on = carrying.taken_off((args, kwargs))  # torch saves what it is given
    # The form that runs a backward within backward would lose the frame's gradients.
    options["use_reentrant"] = False
    # torch would stop a recomputation by an exception. Keras's wrappers of calls make a cycle of it and of their
    # frames, which holds what was computed until Python looks for cycles.
    with set_checkpoint_early_stop(False):
        return original(_Call(function, frame, put_on), *args, **options, **kwargs)


class _Call:
    """One call: computed first, and then again as often as backward asks for it."""

    def __init__(self, f: Callable[..., Any], frame: Frame, put_on: Callable[[Any], Any]) -> None:
        self._f, self._put_on = f, put_on
        self._here = frame
        self._frame = copy.copy(frame)
        self._frame.written = ()
        self._keras = keras_state()
        self._context = contextvars.copy_context()
        self._before: Before | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fetcher = self._frame.fetcher
        args, kwargs = self._put_on((args, kwargs))
        with saved.besides(fetcher) if fetcher is not None else contextlib.nullcontext():
            if self._before is None:
                return self._first(args, kwargs)
            # A context that is entered cannot be entered again, as by a backward within the recomputation.
            return self._context.copy().run(self._again, self._before, args, kwargs)

    def _first(self, args: Any, kwargs: Any) -> Any:
        self._before = Before()
        with self._here.noting(self._before):
            return self._f(*args, **kwargs)

    def _again(self, before: Before, args: Any, kwargs: Any) -> Any:
        with _in_keras_state(self._keras), context.entered(copy.copy(self._frame)), _Past(before.values):
            return self._f(*args, **kwargs)


class _Past(StatelessScope):  # type: ignore[misc]
    """Reads variables as they were before a call, all others as they are around; writes go nowhere."""

    def __init__(self, before: dict[int, Any]) -> None:
        super().__init__(initialize_variables=False)
        self.state_mapping = dict(before)
        self._around = get_stateless_scope()

    def get_current_value(self, variable: Any) -> Any:
        found = super().get_current_value(variable)
        return self._around.get_current_value(variable) if found is None and self._around is not None else found


@contextlib.contextmanager
def _in_keras_state(state: dict[str, Any]) -> Iterator[None]:
    own = global_state.GLOBAL_STATE_TRACKER.__dict__
    before = dict(own)
    restore_keras_state(state)
    try:
        yield
    finally:
        own.clear()
        own.update(before)

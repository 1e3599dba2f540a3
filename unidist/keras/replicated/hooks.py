"""The attributes of Keras on TensorFlow that unidist replaces where Horovod serves it.

Made for Keras 3.15 and 3.16.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from unidist.keras import entrances, files, sessions
from unidist.keras import saving as keras_saving
from unidist.keras import strategy as strategies
from unidist.keras.compat import (
    BaseOptimizer,
    BatchNormalization,
    Layer,
    LossScaleOptimizer,
    SeedGenerator,
    TensorFlowTrainer,
    data_adapters,
)
from unidist.keras.compat import backend as keras_backend
from unidist.keras.interception import Hook, Table, kept
from unidist.keras.processes import Processes
from unidist.keras.replicated import engine
from unidist.keras.replicated.engine import align_seeds as align_seeds

_originals: dict[str, Any] = {}
# Seeds are combined modulo 2**32; the golden ratio spreads the ranks' streams over it.
SEED_STRIDE = 0x9E3779B1


def prepare() -> None:
    """There is nothing to do before the hooks."""


def table() -> Table:
    """Outside of a session of a distributed model all is as before."""
    return Table((*_of_training(), *_of_files()))


def leave() -> None:
    """Each process holds whole models, which are its own from here on."""


def _of_training() -> Iterator[Hook]:
    yield from entrances.hooks(TensorFlowTrainer, _engine_outside_of_sessions, _entering)
    # A LossScaleOptimizer looks at the gradients before it asks the one it holds: all ranks must see the same.
    for optimizer in (BaseOptimizer, LossScaleOptimizer):
        yield Hook(optimizer, "apply", _of_all_ranks, "gradients are averaged over the ranks")
    moments = kept(_originals, "_moments", _moments)
    yield Hook(BatchNormalization, "_moments", moments, "batch statistics of all rows")
    yield Hook(SeedGenerator, "next", kept(_originals, "next", _next), "random numbers differ where rows do")
    yield Hook(data_adapters, "get_data_adapter", engine.adapting, "each rank gets its rows")
    yield Hook(Layer, "losses", _adding_losses, "added losses count by a rank's share of the rows")


def _of_files() -> Iterator[Hook]:
    for owner, name in files.WRITERS:
        yield Hook(owner, name, _by_one_process, "process 0 writes what all hold")
    yield from keras_saving.hooks_of_loading(_processes)


def _processes(model: Any) -> Processes | None:
    held = model is not None and sessions.of(model).engine is not None
    return engine.processes() if held or strategies.current() is not None else None


def _engine_outside_of_sessions(model: Any) -> engine.Engine | None:
    return None if engine.current() is not None else engine.engine_of(model)


@contextlib.contextmanager
def _entering(found: engine.Engine, given: inspect.BoundArguments, name: str) -> Iterator[Any]:
    with found.session():
        yield engine.processes(), engine.peers


def _of_all_ranks(original: Any) -> Any:
    """An optimizer's apply that is given the gradients of the whole batch."""

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        here = engine.current()
        if here is None or here.is_reducing:
            return original(self, grads, trainable_variables)
        here.is_reducing = True
        try:
            given = trainable_variables if trainable_variables is not None else self._trainable_variables
            reduced = here.traced.mean_gradients(list(grads), [tuple(v.shape) for v in given])
            return original(self, reduced, trainable_variables)
        finally:
            here.is_reducing = False

    return apply


def _moments(self: Any, inputs: Any, mask: Any) -> Any:
    here = engine.current()
    if here is None or not here.in_call:
        return _originals["_moments"](self, inputs, mask)
    dims = self._reduction_axes
    weight = tf.ones_like(inputs)
    tiny = 0.0
    if mask is not None:
        weight = tf.cast(tf.broadcast_to(mask[..., tf.newaxis], tf.shape(inputs)), inputs.dtype)
        tiny = keras_backend.epsilon()
    count = tf.reduce_sum(weight, dims, keepdims=True)
    mean = tf.reduce_sum(inputs * weight, dims, keepdims=True) / tf.maximum(count, 1)
    deviation = tf.reduce_sum((inputs - mean) ** 2 * weight, dims)
    row = tf.stack([tf.squeeze(count, dims), tf.squeeze(mean, dims), deviation])
    # The shards are combined as in Chan, Golub and LeVeque (1979), which loses no digits where the mean is large.
    counts, means, deviations = tf.unstack(here.traced.gather_row(row), axis=1)
    total = tf.reduce_sum(counts, 0)
    overall = tf.reduce_sum(counts * means, 0) / (total + tiny)
    spread = tf.reduce_sum(deviations + counts * (means - overall) ** 2, 0)
    return overall, spread / (total + tiny)


def _next(self: Any, ordered: bool = True) -> Any:
    """Random numbers differ between ranks where rows do."""
    seed = _originals["next"](self, ordered)
    here = engine.current()
    if here is None or not here.in_call or not here.traced.place:
        return seed
    return seed + tf.cast([(here.traced.place * SEED_STRIDE) & 0x7FFFFFFF, 0], seed.dtype)


def _adding_losses(original: property) -> property:
    """add_loss, activity and weight regularizers: means over the rows (or independent of them), so each rank counts by
    its share of the rows. Whoever reads them outside of the call, a loss of the model's own too, reads the sums."""

    def losses(self: Any) -> list[Any]:
        found: list[Any] = original.__get__(self)
        here = engine.current()
        if here is None or here.in_call or here.share is None:
            return found
        return [here.traced.mean_of_shares(value, here.share) for value in found]

    return property(losses, doc=original.__doc__)


def _by_one_process(original: Any) -> Any:
    """Every process holds the whole model: one writes, and all go on when the file is there.

    Raises:
        SavingFailedError: on the other processes, where process 0 could not write.
    """

    @functools.wraps(original)
    def save(model: Any, *args: Any, **kwargs: Any) -> Any:
        several = engine.processes() if sessions.of(model).engine is not None else None
        if several is None:
            return original(model, *args, **kwargs)
        with several.saving():
            return original(model, *args, **kwargs) if several.is_first else None

    return save

"""The attributes of Keras on TensorFlow that unidist replaces where Horovod serves it.

Made for Keras 3.15 and 3.16.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from unidist.keras import (
    atomic_files,
    joined_rows,
    numbers,
    own_apply,
    stateful_layers,
    tensorflow_writes,
    trainer_entry,
)
from unidist.keras import saving as keras_saving
from unidist.keras.consistency.processes import Processes
from unidist.keras.layer_facts import overrides
from unidist.keras.patching.compat import (
    BaseOptimizer,
    BatchNormalization,
    Layer,
    LossScaleOptimizer,
    SeedGenerator,
    TensorFlowTrainer,
    data_adapters,
    tensorflow_numpy,
)
from unidist.keras.patching.patches import Hook, Table, calling
from unidist.keras.records import model_record
from unidist.keras.strategies import distribution as distributions
from unidist.keras.tensorflow_horovod import engine, lookups, mixing

# On a gradient: it is the mean over the ranks.
_REDUCED = "_unidist_reduced"


def table() -> Table:
    """Outside of a session of a distributed model all is as before."""
    return Table((*_of_training(), *_of_files()))


def _of_training() -> Iterator[Hook]:
    yield from trainer_entry.hooks(TensorFlowTrainer, _engine_outside_of_sessions, _entering)
    yield trainer_entry.hook_of_errors()
    # A LossScaleOptimizer looks at the gradients before it asks the one it holds: all ranks must see the same.
    for optimizer in (BaseOptimizer, LossScaleOptimizer):
        yield Hook(optimizer, "apply", _of_all_ranks, "gradients are averaged over the ranks")
    why = "a step of the user's own sees the gradients of all ranks"
    yield Hook(tf.GradientTape, "gradient", calling(_gradient), why)
    yield Hook(BatchNormalization, "_moments", calling(_moments), "batch statistics of all rows")
    yield Hook(TensorFlowTrainer, "_make_function", _until_the_end, "data may end where its length is not known")
    yield Hook(tensorflow_numpy, "take", lookups.looking_up, "ids that all ranks look up count once")
    yield joined_rows.hook()
    yield from tensorflow_writes.hooks(calling(_writing), "what a trial of a layer would write is noticed")
    yield Hook(SeedGenerator, "next", calling(_next), "random numbers differ where rows do")
    yield Hook(data_adapters, "get_data_adapter", engine.adapting, "each rank gets its rows")
    yield Hook(Layer, "losses", _adding_losses, "added losses count by a rank's share of the rows")


def _of_files() -> Iterator[Hook]:
    for owner, name in atomic_files.WRITERS:
        yield Hook(owner, name, _by_one_process, "process 0 writes what all hold")
    yield from keras_saving.hooks_of_loading(_processes)


def _processes(model: Any) -> Processes | None:
    held = model is not None and model_record.of(model).engine is not None
    return engine.processes() if held or distributions.current() is not None else None


def _engine_outside_of_sessions(model: Any) -> engine.Engine | None:
    return None if engine.current() is not None else engine.engine_of(model)


@contextlib.contextmanager
def _entering(found: engine.Engine, given: inspect.BoundArguments, name: str) -> Iterator[Any]:
    # An `apply` of the user's own is given what Keras's is.
    own_apply.install(found.model, _with_reduced)
    with found.session():
        yield engine.processes(), engine.peers


@calling
def _of_all_ranks(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """An optimizer's apply that is given the gradients of the whole batch."""
    return _with_reduced(self, functools.partial(original, self), grads, trainable_variables)


def _with_reduced(optimizer: Any, call: Any, grads: Any, trainable_variables: Any = None) -> Any:
    here = engine.current()
    if here is None or here.is_reducing:
        return call(grads, trainable_variables)
    here.is_reducing = True
    try:
        given = trainable_variables if trainable_variables is not None else optimizer._trainable_variables
        reduced = _reduced(here, list(grads), list(given))
        return call(reduced, trainable_variables)
    finally:
        here.is_reducing = False


def _reduced(here: engine.Engine, grads: list[Any], variables: list[Any]) -> list[Any]:
    """Returns means over the ranks.

    Those that a step of the user's own has from its tape are means: a dense one stays what it is by another mean, a
    sparse one would not.
    """
    stateful_layers.refuse_overwritten(here.model)
    left = [
        k
        for k, grad in enumerate(grads)
        if not hasattr(grad, _REDUCED) and not (here.has_reduced and isinstance(grad, tf.IndexedSlices))
    ]
    found = here.traced.mean_gradients([grads[k] for k in left], [tuple(variables[k].shape) for k in left])
    for k, grad in zip(left, found, strict=True):
        grads[k] = grad
    return grads


def _gradient(original: Any, self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    """A tape's gradients of a model's weights and inputs: a step of the user's own may look at them."""
    found = original(self, target, sources, *args, **kwargs)
    here = engine.current()
    if here is None or here.in_call or not overrides(here.model, "train_step"):
        return found
    weights = {id(x): v for v in here.model.trainable_variables for x in (v, v.value)}
    flat, grads = tf.nest.flatten(sources), tf.nest.flatten(found, expand_composites=False)
    of = [k for k, (x, grad) in enumerate(zip(flat, grads, strict=True)) if id(x) in weights and grad is not None]
    reduced = here.traced.mean_gradients([grads[k] for k in of], [tuple(weights[id(flat[k])].shape) for k in of])
    here.has_reduced = here.has_reduced or bool(of)
    for k, grad in zip(of, reduced, strict=True):
        setattr(grad, _REDUCED, True)
        grads[k] = grad
    for k, grad in enumerate(grads):  # of inputs: each rank has its own rows', `count` times
        if k not in of and tf.is_tensor(grad) and grad.dtype.is_floating:
            grads[k] = here.traced.joined(grad)
    return tf.nest.pack_sequence_as(sources, grads)


@calling
def _until_the_end(original: Any, self: Any, step_function: Any) -> Any:
    """Lets Keras's steps end with any iterator.

    With others than tf.data's own they would take one that has ended for a batch.
    """
    steps = original(self, step_function)

    @functools.wraps(steps)
    def function(iterator: Any) -> Any:
        if engine.current() is None or isinstance(iterator, tf.data.Iterator):
            return steps(iterator)
        return steps(itertools.chain([next(iterator)], iterator))

    return function


def _moments(original: Any, self: Any, inputs: Any, mask: Any) -> Any:
    here = engine.current()
    if here is None or not here.in_call or here.sees_all:
        return original(self, inputs, mask)
    if here.is_trying:
        # Of all rows, and the same whichever row is changed.
        return tf.zeros_like(self.moving_mean), tf.ones_like(self.moving_variance)
    own, mask = (None if x is None else here.counted(x, here.total) for x in (inputs, mask))
    return numbers.moments(own, self._reduction_axes, mask, tf.reduce_sum, here.traced.of_ranks)


def _next(original: Any, self: Any, ordered: bool = True) -> Any:
    """Random numbers differ between ranks where rows do."""
    seed = original(self, ordered)
    here = engine.current()
    if here is None or not here.in_call or here.sees_all or not here.traced.place:
        return seed
    return seed + tf.cast([numbers.seed_offset(here.traced.place), 0], seed.dtype)


def _writing(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Ends a trial of a layer that would write what is TensorFlow's own: it is given all rows then."""
    here = engine.current()
    if here is not None and here.is_trying:
        raise mixing.WrittenError
    return original(*args, **kwargs)


def _adding_losses(original: property) -> property:
    """Wraps add_loss, activity and weight regularizers: each rank counts by its share of the rows.

    They are means over the rows, or independent of them. Whoever reads them outside of the call, a loss of the model's
    own too, reads the sums.
    """

    def losses(self: Any) -> list[Any]:
        found: list[Any] = original.__get__(self)
        here = engine.current()
        if here is None or here.in_call or here.share is None:
            return found
        return [here.traced.mean_of_shares(value, here.share) for value in found]

    return property(losses, doc=original.__doc__)


@calling
def _by_one_process(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Every process holds the whole model: one writes, and all go on when the file is there.

    Raises:
        SavingFailedError: on the other processes, where process 0 could not write.
    """
    return writing(model, lambda: original(model, *args, **kwargs))


def writing(model: Any, write: Callable[[], Any], read_along: Callable[[], Any] | None = None) -> Any:
    """One process writes for all: see `saving.by_first`. Every process holds whole values."""
    several = engine.processes() if model is None or model_record.distribution_of(model) is not None else None
    return keras_saving.by_first(None, several, contextlib.nullcontext, write)

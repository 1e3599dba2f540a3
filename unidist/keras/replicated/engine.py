"""Engine: a model whose outermost call computes this rank's rows, and whose gradients are those of all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from unidist import events, session
from unidist.algebra import Layout, Mesh, Sharding
from unidist.backends.protocol import Array
from unidist.errors import CapabilityError, LayoutError
from unidist.keras import sessions, stateful
from unidist.keras.agreement import Peers, stride
from unidist.keras.calls import Call, Stage, around
from unidist.keras.compat import get_keras_mask, in_symbolic_scope, set_keras_mask, tree
from unidist.keras.datasets import Same
from unidist.keras.processes import Processes
from unidist.keras.replicated.traced import Traced
from unidist.keras.strategy import UnidistDistribution
from unidist.keras.telling import applied

_current: ContextVar[Engine | None] = ContextVar("unidist_replicated_engine", default=None)


def current() -> Engine | None:
    """The engine of the fit, evaluate or predict that is going on, or None."""
    return _current.get()


class Engine:
    """One model under one distribution.

    Attributes:
        in_call: this rank's rows are being computed.
        share: while a step is traced, this rank's part of the rows of the batch.
    """

    def __init__(self, model: Any, distribution: UnidistDistribution) -> None:
        if not distribution.strategy.auto_shard_dataset:
            raise CapabilityError(
                "auto_shard_dataset=False is not in this version with Keras on TensorFlow: give every process the "
                "whole data"
            )
        self.model = model
        self.distribution = distribution
        self.traced = Traced(distribution, session.backend())
        self.in_call = False
        self.share: Any = None
        self.is_reducing = False
        self._same = False
        self._cut_call()
        # What was traced before knows nothing of us.
        model.train_function = model.test_function = model.predict_function = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Keras's trainer is at work on this engine's model."""
        token = _current.set(self)
        try:
            align_seeds()
            self.prepare()
            self.traced.failure = None
            yield
        except tf.errors.OpError as error:
            if self.traced.failure is None:
                raise
            raise self.traced.failure from error
        finally:
            _current.reset(token)

    def prepare(self) -> None:
        """Gives every process rank 0's weights, once; keeps XLA from compiling what calls Python.

        Raises:
            CapabilityError: the model was compiled with jit_compile=True, or a layer is stateful.
        """
        if getattr(self.model, "_jit_compile", False):
            raise CapabilityError(
                "jit_compile=True: XLA cannot compile Horovod's collectives; compile(..., jit_compile=False)"
            )
        stateful.refuse(self.model, self.distribution)
        self.model._jit_compile = False
        if self._same or not self.model.built:
            return
        self._same = True
        with events.for_purpose("first weights"):
            for variable in self.model.variables:
                value = tf.convert_to_tensor(variable.value)
                if value.dtype != tf.string:
                    variable.assign(_from_first(self.traced, value))
        applied(self.model, self.distribution)

    def _cut_call(self) -> None:
        """Makes the model compute this rank's rows of a batch and give the outputs of all."""

        def call(rest: Call, *args: Any, **kwargs: Any) -> Any:
            if current() is not self or self.in_call or in_symbolic_scope():
                return rest(*args, **kwargs)
            total = _row_count((args, kwargs))
            start, length = self.traced.rows(total)
            own_args, own_kwargs = tree.map_structure(lambda x: _cut(x, start, length), (args, kwargs))
            self.in_call = True
            try:
                outputs = rest(*own_args, **own_kwargs)
            finally:
                self.in_call = False
            self.share = tf.cast(length, tf.float32) / tf.cast(tf.maximum(total, 1), tf.float32)
            return tree.map_structure(lambda x: self._whole(x, total), outputs)

        around(self.model, Stage.ROWS, lambda rest: functools.partial(call, rest))

    def _whole(self, x: Any, total: Any) -> Any:
        if not tf.is_tensor(x) or x.shape.rank in (None, 0):
            raise LayoutError(f"a model that is cut over processes gives one row for each input row, found {x!r}")
        whole = self.traced.join_rows(x, total)
        mask = get_keras_mask(x)
        if mask is not None:
            set_keras_mask(whole, self.traced.join_rows(mask, total))
        return whole


def _row_count(given: Any) -> Any:
    for leaf in tree.flatten(given):
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf)[0]
    raise LayoutError("a batch must have rows to be cut over processes")


def _cut(x: Any, start: Any, length: Any) -> Any:
    return x[start : start + length] if tf.is_tensor(x) and x.shape.rank != 0 else x


def engine_of(model: Any) -> Engine | None:
    """The engine of a model: the one it has, or one by the distribution that it has or that is active."""
    found: Engine | None = sessions.engine_of(model, Engine)
    return found


def align_seeds() -> None:
    """Rank 0's random states of Python, NumPy and TensorFlow on every process, so that seeds and shuffles agree."""
    if (several := processes()) is not None:
        several.align_seeds()


def adapting(original: Any) -> Any:
    """Keras's get_data_adapter: of data that all processes must see alike."""

    @functools.wraps(original)
    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        adapter = original(*args, **kwargs)
        several = processes() if current() is not None else None
        return adapter if several is None else Same(adapter, several)

    return get_data_adapter


def processes() -> Processes | None:
    """Those of the world, if there are several."""
    here: Any = session.backend()
    count = here.process_count()
    return _all(here, here.process_index(), count) if count > 1 else None


@functools.lru_cache(maxsize=4)
def _all(here: Any, place: int, count: int) -> Processes:
    world = Mesh({"world": count})
    cut = Sharding(world, Layout("world"), (count,))

    def of_first(array: Array, purpose: str) -> Array:
        whole = Sharding(world, Layout(), array.shape)
        with events.for_purpose(purpose):
            found: Array = here.broadcast(tf.constant(array), whole, ("world",), 0).numpy()
        return found

    def of_all(number: int, purpose: str) -> tuple[int, ...]:
        with events.for_purpose(purpose):
            found = here.redistribute(tf.constant([number], tf.int32), cut, cut.with_layout(Layout()))
        return tuple(int(one) for one in found.numpy())

    return Processes(place, tuple((rank,) for rank in range(count)), of_first, of_all)


def peers() -> Peers | None:
    """The processes of the world, if there are several. Each holds the whole model."""

    def replica(variable: Any) -> Array:
        flat = tf.reshape(variable.value, (-1,))
        found: Array = flat[:: stride(int(flat.shape[0]))].numpy()
        return found

    several = processes()
    return None if several is None else Peers(several, replica)


def _from_first(traced: Traced, value: Any) -> Any:
    whole = Sharding(traced.mesh, Layout(), tuple(value.shape))
    return traced.backend.broadcast(value, whole, traced.mesh.axis_names, 0)

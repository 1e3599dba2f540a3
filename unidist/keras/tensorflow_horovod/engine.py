"""Engine: a model whose outermost call computes this rank's rows, and whose gradients are all ranks'.

A rank without rows of a batch computes the first row of it, and nothing of that counts: TensorFlow's convolutions and
poolings refuse no rows, or end the process.
"""

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
from unidist.keras import joined_rows, stateful_layers
from unidist.keras.consistency.agreement import Peers, stride
from unidist.keras.consistency.processes import Processes
from unidist.keras.feed.lockstep import same
from unidist.keras.layer_facts import is_container
from unidist.keras.patching.compat import in_symbolic_scope, tree
from unidist.keras.patching.layer_calls import Call, Stage, around
from unidist.keras.patching.patches import calling
from unidist.keras.records import model_record
from unidist.keras.records.layer_report import applied
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.tensorflow_horovod import mixing
from unidist.keras.tensorflow_horovod.traced import Traced

_current: ContextVar[Engine | None] = ContextVar("unidist_tensorflow_horovod_engine", default=None)


def current() -> Engine | None:
    """The engine of the fit, evaluate or predict that is going on, or None."""
    return _current.get()


class Engine:
    """One model under one distribution.

    Attributes:
        in_call: this rank's rows are being computed.
        total: while they are, the rows of the whole batch.
        sees_all: within that, the rows of all ranks are.
        is_trying: what may look at several rows is tried on a few.
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
        self.in_call = self.sees_all = self.is_trying = False
        self.total: Any = None
        self.share: Any = None
        self.mixers: list[mixing.Mixer] | None = None
        self.is_reducing = False
        self.has_reduced = False  # gradients, as soon as a tape gave them
        self._same = False
        self._cut_call()
        # What was traced before knows nothing of us.
        model.train_function = model.test_function = model.predict_function = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Keras's trainer is at work on this engine's model."""
        token = _current.set(self)
        try:
            if (several := processes()) is not None:
                several.align_seeds()
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
        stateful_layers.refuse(self.model, self.distribution)
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

    # rows ---------------------------------------------------------------------------------------------------------

    def has_rows(self, x: Any) -> bool:
        """Returns whether a tensor in the call has a row for each of this rank's.

        What is cut in a program has a first dim that nobody knows.
        """
        if x.shape.rank in (None, 0):
            return False
        return x.shape[0] is None or (tf.executing_eagerly() and x.shape[0] == int(self._computed(self.total)[1]))

    def static_total(self) -> int | None:
        """The rows of the batch, where no program is traced."""
        return int(self.total) if tf.executing_eagerly() else None

    def gather(self, x: Any, what: str) -> Any:
        """The rows of all ranks, fanned out: gradients come back summed."""
        return self.traced.gather_rows(self.counted(x, self.total), self.total, what)

    def own_rows(self, x: Any, total: Any) -> Any:
        start, length = self._computed(total)
        return x[start : start + length]

    def counted(self, x: Any, total: Any) -> Any:
        """Returns what this rank has computed of its own rows: nothing, where the batch has none for it."""
        return x[: tf.where(self.traced.rows(total)[1] > 0, tf.shape(x)[0], 0)]

    def _computed(self, total: Any) -> tuple[Any, Any]:
        start, length = self.traced.rows(total)
        return tf.where(length > 0, start, 0), tf.maximum(length, 1)

    def own_share(self) -> Any:
        """This rank's part of the rows of the batch."""
        _, length = self.traced.rows(self.total)
        return tf.cast(length, tf.float32) / tf.cast(tf.maximum(self.total, 1), tf.float32)

    @contextlib.contextmanager
    def seeing_all(self) -> Iterator[None]:
        """Lets what is called inside compute the rows of all ranks, on each."""
        self.sees_all = True
        try:
            yield
        finally:
            self.sees_all = False

    def _cut_call(self) -> None:
        """Makes the model compute this rank's rows of a batch and give the outputs of all."""

        def call(rest: Call, *args: Any, **kwargs: Any) -> Any:
            if current() is not self or self.in_call or in_symbolic_scope():
                return rest(*args, **kwargs)
            if self.mixers is None:  # the first call of a built model
                self.mixers = mixing.install(self, current)
            self.total = total = _row_count((args, kwargs))
            start, length = self._computed(total)
            own_args, own_kwargs = tree.map_structure(lambda x: _cut(x, start, length), (args, kwargs))
            self.in_call = True
            try:
                outputs = self._called(rest, *own_args, **own_kwargs)
            finally:
                self.in_call = False
            self.share = self.own_share()
            return tree.map_structure(lambda x: self._whole(x, total), outputs)

        around(self.model, Stage.ROWS, lambda rest: functools.partial(call, rest))

    def _called(self, rest: Call, *args: Any, **kwargs: Any) -> Any:
        """Calls the model on this rank's rows; on all where the code of a model of one's own looks at several."""
        itself = self.mixers[:1] if self.mixers and not is_container(self.model) else []
        return itself[0].call(rest, *args, **kwargs) if itself else rest(*args, **kwargs)

    def _whole(self, x: Any, total: Any) -> Any:
        if not tf.is_tensor(x) or x.shape.rank in (None, 0):
            raise LayoutError(f"a model that is cut over processes gives one row for each input row, found {x!r}")
        return joined_rows.moved(x, lambda own: self.traced.join_rows(self.counted(own, total), total))


def _row_count(given: Any) -> Any:
    for leaf in tree.flatten(given):
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf)[0]
    raise LayoutError("a batch must have rows to be cut over processes")


def _cut(x: Any, start: Any, length: Any) -> Any:
    if not tf.is_tensor(x) or x.shape.rank == 0:
        return x
    if isinstance(x, tf.SparseTensor):
        behind = x.dense_shape[1:]
        first, size = (tf.cast([one], tf.int64) for one in (start, length))
        return tf.sparse.slice(x, tf.concat([first, 0 * behind], 0), tf.concat([size, behind], 0))
    own = x[start : start + length]
    # In a program nobody shall know how many rows these are: a constant may have as many (has_rows).
    return own if tf.executing_eagerly() else tf.compat.v1.placeholder_with_default(own, [None, *own.shape[1:]])


def engine_of(model: Any) -> Engine | None:
    """The engine of a model: the one it has, or one by the distribution that it has or that is active."""
    found: Engine | None = model_record.engine_of(model, Engine)
    return found


@calling
def adapting(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Keras's get_data_adapter: of data that all processes must see alike."""
    adapter = original(*args, **kwargs)
    several = processes() if current() is not None else None
    if several is None:
        return adapter
    dataset = adapter.get_tf_dataset()
    return same(adapter, lambda: dataset, several)


def processes() -> Processes | None:
    """Returns the processes of the world, if there are several."""
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

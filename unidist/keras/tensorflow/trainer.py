"""The entrances and steps of Keras's TensorFlow trainer: packs batches, makes one tf.function a step.

Results are on the host.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree

from unidist import events, log
from unidist.backends.tensorflow.guards import REPLICATED
from unidist.errors import CapabilityError
from unidist.keras import active_distribution
from unidist.keras.feed.lockstep import Part, symbol_of, to_build
from unidist.keras.patching.compat import in_stateless_scope
from unidist.keras.patching.patches import calling
from unidist.keras.records import model_record
from unidist.keras.strategies.distribution import UnidistDistribution
from unidist.keras.tensorflow import compiled, parts, pinning, placing, slicing, values, worlds

_NO_RULE = re.compile(r"SPMD|DTensor|[Ll]ayout|mesh|tf\.\w*TensorList|EmptyTensorList|error: 'tf\.")
_SOME_ROWS = 8
# What to do instead of an op that DTensor has not at all.
_INSTEAD = {
    r"Random|Multinomial|ParameterizedTruncatedNormal": "draw by keras.random with a keras.random.SeedGenerator",
    r"(Empty)?TensorList|While|If": "write the loop out in Python, or use keras.ops of whole tensors",
    r"String|AsString|Hash|Lookup|SparseCross|Regex": "look up and cross strings in the data, by dataset.map",
    r"PyFunc|EagerPyFunc": "compute it by keras.ops or TensorFlow's own operations",
    r"an op": "return what is to be read from the step, and read it in a callback",
}


@contextlib.contextmanager
def entering(distribution: UnidistDistribution, given: inspect.BoundArguments, name: str) -> Iterator[Any]:
    """Works under the model's distribution. What is to be placed is placed where a step is made."""
    several = worlds.processes()
    if name == "fit" and several is not None:
        several.align_seeds()
    with active_distribution.active(None), worlds.telling(name), parts.reading(distribution):
        model_record.of(given.arguments["self"]).told = distribution
        yield several, worlds.peers


@calling
def building(original: Any, self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
    """Wraps _maybe_symbolic_build: builds metrics and losses before the step is traced.

    Their variables must be placed by then.
    """
    distribution = placing.distribution_of(self)
    if distribution is None:
        return original(self, iterator=iterator, data_batch=data_batch)
    if iterator is not None:
        data_batch = _symbols(iterator)
        rows_of = functools.partial(parts.rows_of_counts, distribution)
        iterator = to_build(iterator, rows_of) if data_batch is None else None
    elif data_batch is not None:
        data_batch = tree.map_structure(lambda leaf: leaf if leaf is None else np.asarray(leaf), data_batch)
    try:
        return self._symbolic_build(iterator=iterator, data_batch=data_batch)
    except ValueError as error:
        if "unknown rank" not in str(error):
            raise
        raise CapabilityError(
            f"a loss, metric or layer gives a result without a known shape ({error}), as tf.numpy_function and "
            "tf.py_function do, which DTensor cannot lay out: compute it by keras.ops or TensorFlow's own operations"
        ) from error


def _symbols(steps: Any) -> Any:
    """Returns what a dataset says of its batches; None: it does not say all.

    Keras alone builds nothing from a batch here. A shuffle whose first batch was read for that comes in another order.
    Where nobody knows the number of rows it is some number, as code that is run eagerly may count on one.
    """
    specs = getattr(steps._get_iterator(), "element_spec", None)
    if not all(isinstance(one, tf.TensorSpec) and one.shape.rank for one in tree.flatten(specs)):
        return None
    rows = steps.data_adapter.batch_size or _SOME_ROWS
    return tree.map_structure(lambda one: symbol_of(one, one.shape[0] or rows), specs)


def making_step(name: str, step: str) -> Callable[[Any], Any]:
    """make_train_function and its like: places what is not placed yet, and makes the step."""

    @calling
    def make(original: Any, self: Any, force: bool = False) -> Any:
        distribution = placing.distribution_of(self)
        if distribution is None:
            return original(self, force)
        placing.prepare(self, distribution)
        slicing.adopt_loss(self)
        if getattr(self, name) is None or force:
            found = _Step(self, distribution, getattr(self, step), step)
            setattr(self, name, found.predict if step == "predict_step" else found.run)
        return getattr(self, name)

    return make


class _Step:
    """One of a model's steps as a program of DTensor."""

    def __init__(self, model: Any, distribution: UnidistDistribution, step: Callable[[Any], Any], kind: str) -> None:
        self._model = model
        self._distribution = distribution
        self._mesh = worlds.native_mesh(distribution.mesh)
        self._kind = kind
        self._step = step
        self._programs: dict[Any, _Program] = {}

    def run(self, iterator: Any) -> Any:
        """As many batches as steps_per_execution says; the results of the last."""
        outputs = None
        for k in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if not k:
                    raise StopIteration from None
                break
            outputs = self._on_batch(batch)
        return outputs

    def predict(self, batches: list[Any]) -> Any:
        outputs = [self._on_batch(batch) for batch in batches]
        return tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs) if len(outputs) > 1 else outputs[0]

    def _on_batch(self, batch: Any) -> Any:
        given = parts.counted(batch) if parts.are_given(self._distribution) else batch
        packed = tree.map_structure(functools.partial(pack, distribution=self._distribution), given)
        try:
            with (
                worlds.together(f"a {self._kind.replace('_', ' ')} on {_signature(packed)}"),
                slicing.on(self._mesh),
                pinning.unrolled(self._model),
                events.for_purpose(self._kind),
            ):
                outputs = self._run(packed)
        except (tf.errors.OpError, ValueError, TypeError) as error:
            if (told := _without_rule(error, self._model)) is not None:
                raise told from error
            raise
        return tree.map_structure(values.on_host, outputs)

    def _run(self, batch: Any) -> Any:
        if self._model.run_eagerly:
            compiled.record(self._model, self._distribution, self._kind, batch)
            with placing.constants_on_mesh(self._model, self._mesh):
                return self._step(batch)
        key = _signature(batch)
        if key not in self._programs:
            self._programs[key] = _Program(self._step, self._distribution, self._kind)
        program = self._programs[key]
        with contextlib.ExitStack() as first:
            if not program.has_run:
                first.enter_context(log.while_long(f"compiling a {self._kind.replace('_', ' ')}"))
                first.enter_context(_unsized(self._model))
            outputs = program.run(batch)
        if program.traffic.events is None:
            compiled.record(self._model, self._distribution, self._kind, batch)
        elif events.listening():
            for event in program.traffic.events:
                events.emit(event)
        return outputs


@contextlib.contextmanager
def _unsized(model: Any) -> Iterator[None]:
    """Logs losses of several outputs without the sizes of batches, which Keras's own programs do not know."""
    losses = getattr(model, "_compile_loss", None)
    metrics = [metric for metric in losses.metrics if metric is not None] if losses is not None else []
    for metric in metrics:
        update = metric.update_state
        object.__setattr__(metric, "update_state", lambda value, sample_weight=None, update=update: update(value))
    try:
        yield
    finally:
        for metric in metrics:
            object.__delattr__(metric, "update_state")


def _signature(batch: Any) -> str:
    def told(leaf: Any) -> str:
        return "none" if leaf is None else f"{leaf.dtype.name}{leaf.shape.as_list()}"

    return str(tree.map_structure(told, batch))


class _Program:
    """A step for one shape of batch, and what it communicates. Its results are whole on every device."""

    def __init__(self, step: Callable[[Any], Any], distribution: UnidistDistribution, kind: str) -> None:
        mesh = worlds.native_mesh(distribution.mesh)

        def whole(batch: Any) -> Any:
            return tree.map_structure(lambda x: slicing.whole(x, mesh), step(batch))

        self._function = tf.function(whole, autograph=False)
        self.has_run = False
        self.traffic = compiled.GraphCollectives(distribution.mesh, f"{kind.replace('_', ' ')} (compiled)")

    def run(self, batch: Any) -> Any:
        if self.has_run:
            return self._function(batch)
        with self.traffic.watching() as results:
            results.append(self._function(batch))
        self.has_run = True
        return results[0]


def pack(value: Any, distribution: UnidistDistribution) -> Any:
    """Puts an array of a batch on the mesh: its rows over the data axes, or whole if they do not divide.

    So it is with the last rows of an epoch. Every number is then computed from all of them, so the results are the
    same.
    """
    if value is None or isinstance(value, tf.experimental.Optional):
        return None
    if values.is_spread(value):
        return value
    if isinstance(value, Part):
        return parts.pack(value, distribution)
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise CapabilityError(f"DTensor takes no {type(value).__name__}: make it dense before it is fed to the model")
    host = np.asarray(value)
    strategy = distribution.strategy
    layout = strategy.batch()
    if not host.ndim or host.shape[0] % strategy.data_shards or not host.shape[0]:
        layout = type(layout)()
    return values.put(host, worlds.native_layout(layout, host.shape, distribution.mesh))


def _without_rule(error: Exception, model: Any) -> CapabilityError | None:
    text = str(error)
    if not _NO_RULE.search(text):
        return None
    node = re.search(r"(?:tf\.|[Oo]p:? ?['\"]?)([A-Z]\w+)", text)
    names = [layer.name for layer in model._flatten_layers() if re.search(rf"\b{re.escape(layer.name)}\b", text)]
    where = f"layer {names[-1]!r}" if names else f"model {model.name!r}"
    op = node.group(1) if node else "an op"
    instead = next((do for ops, do in _INSTEAD.items() if re.match(ops, op)), "leave this layer's variables replicated")
    # Of no use for an op that has a rule, which refuses what it is given.
    whole = f"let every device compute it whole: set {REPLICATED}{op.upper()}=1 before TensorFlow runs; or "
    return CapabilityError(
        f"{where}: DTensor cannot run {op} on shards ({text.strip().splitlines()[0][:300]}). Either {instead}; or "
        f"{whole if 'does not implement' in text else ''}use torch or jax"
    )


@calling
def telling_metrics(original: Any, self: Any) -> Any:
    """Trainer.get_metrics_result: outside of a step, values on the host."""
    found = original(self)
    return tree.map_structure(values.on_host, found) if tf.executing_eagerly() else found


@calling
def calling_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Layer.__call__ of a model that is placed, outside of a step: takes and gives arrays on the host."""
    distribution = placing.placed_under(self)
    if distribution is None or not tf.executing_eagerly() or in_stateless_scope() or not _is_host(args, kwargs):
        return original(self, *args, **kwargs)
    args, kwargs = tree.map_structure(lambda leaf: _packed(leaf, distribution), (args, kwargs))
    mesh = worlds.native_mesh(distribution.mesh)
    with worlds.together("a call of a model"), active_distribution.active(None):
        with slicing.on(mesh), pinning.unrolled(self), placing.constants_on_mesh(self, mesh):
            found = original(self, *args, **kwargs)
        return tree.map_structure(values.on_host, found)


def _is_host(args: Any, kwargs: Any) -> bool:
    leaves = [leaf for leaf in tree.flatten((args, kwargs)) if isinstance(leaf, np.ndarray | tf.Tensor)]
    return bool(leaves) and not any(tf.is_symbolic_tensor(leaf) or values.is_spread(leaf) for leaf in leaves)


def _packed(leaf: Any, distribution: UnidistDistribution) -> Any:
    """Puts an array on the mesh; the gradient of a tensor is gathered again."""
    if not isinstance(leaf, tf.Tensor):
        return pack(leaf, distribution) if isinstance(leaf, np.ndarray) else leaf

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def put(x: Any) -> tuple[Any, Any]:
        return pack(x, distribution), values.on_host

    return put(leaf)


@calling
def applying(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Optimizer.apply: each gradient is first laid out as its variable. See backends/tensorflow/guards.py."""
    own = self._trainable_variables if trainable_variables is None else trainable_variables
    grads, own = list(grads), list(own)
    if not any(isinstance(getattr(v, "_value", None), values.SpreadVariable) for v in own):
        return original(self, grads, trainable_variables)
    placing.place_optimizer(self, own)
    laid = [_laid(grad, variable) for grad, variable in zip(grads, own, strict=True)]
    mesh = next(v._value.layout.mesh for v in own if isinstance(v._value, values.SpreadVariable))
    with values.updating(), slicing.on(mesh) if tf.executing_eagerly() else contextlib.nullcontext():
        return original(self, laid, own if trainable_variables is not None else None)


RELAY = True


def _laid(gradient: Any, variable: Any) -> Any:
    value = getattr(variable, "_value", None)
    if not RELAY or gradient is None or not isinstance(value, values.SpreadVariable):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return values.rows_by_id(gradient, value)
    return values.reduced(gradient, value.compute or value.layout, value.state or value.layout)

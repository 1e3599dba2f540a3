"""What the processes of the tests of the contract run, on every backend: a model and a way to train it a promise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops, optimizers

import unidist
from tests.support.runs import Result, fresh, is_first, made_ready, scope, strategy, told

CLASSES, BATCH = 4, 4
# Batches of another size are another program, which TensorFlow compiles for seconds: with it those of tests/parity/
# test_training.py are ragged. Elsewhere there are four batches, the last of two rows.
IS_EVEN = keras.config.backend() == "tensorflow"
ROWS = 12 if IS_EVEN else 14
# Rows of a batch: on JAX two of one size, which its devices do not divide.
EVALUATED = {"tensorflow": BATCH, "jax": 7, "torch": 5}[keras.config.backend()]
# And JAX: what an optimizer makes of gradients does not depend on the rows that they are of.
FEW_PROGRAMS = keras.config.backend() != "torch"
RULES: dict[str, tuple[str | None, ...]] = {".*a/kernel": (None, "model"), ".*b/kernel": ("model", None)}
OWN_RULES: dict[str, dict[str, tuple[str | None, ...]]] = {
    "lora": {".*ids/embeddings": (None, "model"), **RULES},
    "spread": {".*a/kernel": (None, None, "model"), ".*b/kernel": (None, "model", None)},
}


def rows(count: int = ROWS) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(count, 12)).astype("float32"), rng.integers(0, CLASSES, count).astype("int32")


def plain() -> Any:
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Dense(16, "relu", name="a"),
            layers.Dense(8, "tanh", name="b"),
            layers.Dense(CLASSES, name="c"),
        ],
        name="plain",
    )


class Penalty(layers.Layer):
    """Adds a loss of its call, which is a mean over the rows."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def regularized(**norm: Any) -> Any:
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Dense(16, "relu", name="a", kernel_regularizer="l2", activity_regularizer="l1"),
            Penalty(name="penalty"),
            # A bias before batch statistics has no gradient but rounding noise.
            layers.Dense(8, name="b", use_bias=False, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02)),
            # Batches have as few as two rows. Divided by what is left of them with Keras's epsilon, float32's rounding,
            # which is another on each kind of processor, becomes larger than 1e-5 on one device too.
            layers.BatchNormalization(name="norm", epsilon=0.3, **norm),
            # On torch each rank draws for its own rows.
            layers.GaussianNoise(0.1 if keras.config.backend() == "jax" else 0.0, seed=5, name="noise"),
            layers.Dense(CLASSES, name="c"),
        ],
        name="regularized",
    )


def _mixed(y_pred: Any) -> Any:
    centered = y_pred - ops.mean(y_pred, axis=0, keepdims=True)
    covariance = ops.matmul(ops.transpose(centered), centered) / ops.cast(ops.shape(y_pred)[0], "float32")
    return 0.1 * ops.sum(ops.square(covariance))


class Covariance(keras.Sequential):
    """A loss that mixes the rows: no sum of what parts of them lose. It adds what its layers lose by itself."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.mean(ops.square(y_pred - ops.one_hot(y, CLASSES))) + _mixed(y_pred) + sum(self.losses)


class CovarianceBesides(keras.Sequential):
    """Besides what Keras computes."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight, training) + _mixed(y_pred)


def covariance() -> Any:
    return Covariance(regularized().layers, name="plain")


def synchronized() -> Any:
    return regularized(synchronized=True)


def besides() -> Any:
    return CovarianceBesides(regularized().layers, name="plain")


def lora() -> Any:
    inputs = layers.Input((5,), dtype="int32")
    embedded = layers.Embedding(16, 12, name="ids")(inputs)
    hidden = layers.Dense(16, "tanh", name="a")(layers.GlobalAveragePooling1D(name="pool")(embedded))
    model = keras.Model(inputs, layers.Dense(CLASSES, name="c")(layers.Dense(8, name="b")(hidden)), name="lora")
    for name in ("ids", "a", "b"):
        model.get_layer(name).enable_lora(4)
    return model


def spread() -> Any:
    """Biases that are the same along the outputs' cut dim, with a dim there and without one."""
    inputs = layers.Input((12,))
    first = layers.EinsumDense("bc,cde->bde", (4, 4), bias_axes="d", activation="tanh", name="a")(inputs)
    second = layers.EinsumDense("bc,cde->bde", (4, 2), bias_axes="e", activation="tanh", name="b")(inputs)
    both = layers.Concatenate(name="both")([layers.Flatten(name="f")(first), layers.Flatten(name="g")(second)])
    return keras.Model(inputs, layers.Dense(CLASSES, name="c")(both), name="spread")


MODELS: dict[str, Callable[[], Any]] = {
    "regularized": regularized,
    "synchronized": synchronized,
    "covariance": covariance,
    "besides": besides,
    "lora": lora,
    "spread": spread,
}


def _sgd(**options: Any) -> Any:
    return optimizers.SGD(**{"learning_rate": 0.1, **options})


def _adam(**options: Any) -> Any:
    # With Keras's epsilon of 1e-7 Adam turns rounding noise of gradients that are nearly zero into whole steps.
    return optimizers.Adam(0.01, epsilon=1e-3, **options)


def _decayed(**options: Any) -> Any:
    return optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3, **options)


class OfAllGradients(optimizers.SGD):
    """Its `apply` looks at all gradients and at all weights."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = trainable_variables or self._trainable_variables
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
        size = sum(ops.sum(ops.abs(ops.convert_to_tensor(v))) for v in variables)
        return super().apply([g * size / (10.0 + 100.0 * norm) for g in grads], trainable_variables)


class OfWholeGradients(optimizers.Adam):
    """Behind Keras's clipping each gradient is kept small against its weights."""

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        sizes = [ops.norm(ops.convert_to_tensor(v)) + 1e-3 for v in trainable_variables]
        small = [g * ops.minimum(1.0, 0.1 * s / (ops.norm(g) + 1e-6)) for g, s in zip(grads, sizes, strict=True)]
        return super()._backend_apply_gradients(small, trainable_variables)


# Scales up at every second step, and down where gradients overflow: 2**126 times a loss does.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "clipnorm": lambda: _sgd(clipnorm=0.1, momentum=0.9),
    "global clipnorm": lambda: _adam(global_clipnorm=0.1),
    "clipvalue": lambda: _sgd(clipvalue=0.01, momentum=0.9),
    "ema": lambda: _sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulation": lambda: _adam(gradient_accumulation_steps=2),
    "ema at the end": lambda: _sgd(use_ema=True, ema_momentum=0.5),
    "schedule": lambda: _sgd(learning_rate=optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9),
    "decay": _decayed,
    "scaled": lambda: optimizers.LossScaleOptimizer(_adam(), initial_scale=2.0**8, dynamic_growth_steps=2),
    "overflow": lambda: optimizers.LossScaleOptimizer(_adam(), initial_scale=2.0**127),
    "scaled accumulation": lambda: optimizers.LossScaleOptimizer(_adam(gradient_accumulation_steps=2), 2.0**8),
    # Several at once, where each program takes seconds to compile.
    "clipnorm, schedule, ema": lambda: _sgd(
        learning_rate=optimizers.schedules.ExponentialDecay(0.1, 2, 0.5),
        momentum=0.9,
        clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    ),
    "clipvalue, ema at the end": lambda: _sgd(clipvalue=0.01, momentum=0.9, use_ema=True, ema_momentum=0.5),
    "global clipnorm, decay": lambda: _decayed(global_clipnorm=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, epsilon=1e-3),
    "lion": lambda: optimizers.Lion(0.001),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "nadam": lambda: optimizers.Nadam(0.01, epsilon=1e-3),
    # Of whole variables:
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "schedule free": lambda: optimizers.ScheduleFreeAdamW(0.01, epsilon=1e-3),
    "lamb": lambda: optimizers.Lamb(0.01, epsilon=1e-3),
    "muon": lambda: optimizers.Muon(0.01, epsilon=1e-3),
    "several": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            _adam(global_clipnorm=0.1),
            {".*a/kernel": optimizers.Muon(0.01, epsilon=1e-3), ".*b/.*": _sgd(momentum=0.9)},
        )
    ),
    # Of all gradients:
    "own apply": lambda: OfAllGradients(0.1, momentum=0.9),
    "own gradients": lambda: OfWholeGradients(0.01, epsilon=1e-3),
    "own apply, accumulation": lambda: OfAllGradients(0.1, gradient_accumulation_steps=2),
}


class Largest(keras.metrics.Metric):
    """The largest error so far, and how many batches were seen: no sums of what parts of the rows give."""

    def __init__(self, name: str = "largest", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.top = self.add_weight(name="top", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = ops.abs(ops.cast(y_true, "float32") - y_pred)
        self.top.assign(ops.maximum(self.top, ops.max(errors)))
        self.batches.assign_add(1.0)

    def result(self) -> Any:
        return self.top + self.batches


class Counted(Largest):
    """Its result is its state itself, as Keras's guides write it."""

    def result(self) -> Any:
        return self.top


METRICS: dict[str, Callable[[], list[Any]]] = {
    "state": lambda: [Counted()],
    "own": lambda: [Largest(), keras.metrics.MeanAbsoluteError()],
    "binary": lambda: [
        keras.metrics.AUC(num_thresholds=20),
        keras.metrics.Precision(),
        keras.metrics.Recall(),
        keras.metrics.BinaryIoU(threshold=0.5),
        keras.metrics.F1Score(threshold=0.5),
        keras.metrics.MeanAbsoluteError(),
    ],
}


def _crossed(model: Any, optimizer: Any, **options: Any) -> Any:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def _strategy(kind: str | None, zero: int, rules: Any = RULES) -> Any:
    return None if kind is None else strategy(kind, rules, zero=zero)


def _fitted_on_even(model: Any, evaluates: bool = True) -> Result:
    """On batches of one size, where each other one is a program more, and so is an evaluation."""
    return _fitted(model, *rows(12), evaluated=BATCH * evaluates) if FEW_PROGRAMS else _fitted(model, *rows())


def _fitted(model: Any, x: Any, y: Any, *, evaluated: int = EVALUATED, **options: Any) -> Result:
    model = made_ready(model)
    batch = options.pop("batch_size", BATCH)
    history = model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0, **options).history
    seen = told(model)  # now: Keras on JAX loses the averages of a model that is evaluated
    if not evaluated:
        return {"history": history, **seen}
    found = model.evaluate(x, y, batch_size=evaluated, verbose=0, return_dict=True)
    return {"history": history, "evaluate": found, **seen}


def optimized(kind: str | None, zero: int, name: str) -> Result:
    fresh()
    with scope(_strategy(kind, zero)):
        model, optimizer = plain(), OPTIMIZERS[name]()
        if "decay" in name:
            # By a name, and by itself, before it is placed.
            optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["bias"])
        _crossed(model, optimizer)
    # Some evaluate other weights than they train.
    return _fitted_on_even(model, evaluates="ema" in name or "free" in name)


def averaged_twice(kind: str | None, zero: int) -> int:
    """Fits, evaluates and fits again with averages of the weights; the number of steps."""
    fresh()
    with scope(_strategy(kind, zero)):
        model = _crossed(plain(), OPTIMIZERS["ema"]())
    for _ in range(2):
        _fitted(model, *rows())
    return int(np.asarray(model.optimizer.iterations))


def built(kind: str | None, zero: int, name: str) -> Result:
    """Losses added by layers, losses that mix rows, adapters of low rank on frozen, cut kernels."""
    fresh()
    with scope(_strategy(kind, zero, OWN_RULES.get(name, RULES))):
        model = _crossed(MODELS[name](), _adam())
    x, y = rows()
    return _fitted(model, (np.abs(x[:, :5] * 5).astype("int32") % 16) if name == "lora" else x, y)


def built_in_float64(kind: str | None, zero: int, name: str) -> Result:
    """The statistics of the last batch are those of two rows: dividing by them makes float32's rounding, which is
    another on each kind of processor, larger than 1e-5."""
    keras.config.set_floatx("float64")
    try:
        return built(kind, zero, name)
    finally:
        keras.config.set_floatx("float32")


def measured(kind: str | None, zero: int, name: str) -> Result:
    """Metrics that keep more than a mean."""
    fresh()
    with scope(_strategy(kind, zero)):
        top = layers.Dense(1, "sigmoid", name="d")
        model = keras.Sequential([layers.Input((12,)), *plain().layers, top], name="plain")
        model.compile(_sgd(momentum=0.9), "binary_crossentropy", metrics=METRICS[name]())
    x, y = rows()
    return _fitted(model, x, (y > 1).astype("float32")[:, None], sample_weight=np.linspace(0, 2, ROWS))


def toggled(kind: str | None, zero: int) -> Result:
    """A layer frozen between two fits, one from the beginning, and both thawed for a third."""
    fresh()
    x, y = rows(12 if FEW_PROGRAMS else ROWS)
    with scope(_strategy(kind, zero)):
        model = plain()
        model.get_layer("b").trainable = False
        _crossed(model, _sgd(momentum=0.9)).fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        model.get_layer("a").trainable = False
        _crossed(model, _sgd(momentum=0.9)).fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        model.get_layer("a").trainable = model.get_layer("b").trainable = True
        return _fitted_on_even(_crossed(model, _sgd(momentum=0.9)), evaluates=False)


def thawed(kind: str | None, zero: int) -> Result:
    """A frozen base of convolutions with a new head, and then all of it."""
    fresh()
    x, y = rows(12)
    with scope(_strategy(kind, zero)):
        convolutions = [layers.Conv2D(8, 3, activation="tanh", name="c"), layers.BatchNormalization(epsilon=0.3)]
        base = keras.Sequential([keras.Input((3, 4, 1)), *convolutions, layers.Flatten()], name="base")
        base.trainable = False
        given = keras.Input((12,))
        out = layers.Dense(CLASSES, name="head")(base(layers.Reshape((3, 4, 1))(given), training=False))
        model = _crossed(keras.Model(given, out), _adam())
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        model.evaluate(x, y, batch_size=BATCH, verbose=0)
        base.trainable = True
        return _fitted_on_even(_crossed(model, _adam()))


def seeded(kind: str | None, zero: int) -> Result:
    """Dropout and noise."""
    fresh()
    with scope(_strategy(kind, zero)):
        random = [layers.Dropout(0.5, name="drop"), layers.GaussianNoise(0.5, name="noise")]
        model = _crossed(keras.Sequential([*plain().layers[:1], *random, *plain().layers[1:]], name="plain"), _adam())
    return _fitted(model, *rows(), evaluated=0)


def _tables(name: str) -> Any:
    tokens, table = layers.Input((7,), dtype="int32"), layers.Embedding(5, 6, name="table")
    h = table(tokens)
    if name == "tied":
        return keras.Model(tokens, Likeness(table, name="likeness")(layers.LayerNormalization(name="norm")(h)))
    h = layers.Flatten()(h)
    # Looks at all rows: no proof says that it treats each alone.
    h = layers.Lambda(lambda x: x - ops.mean(x, axis=0), name="centred")(h) if name == "centred" else h
    if name == "normalized":
        unit = layers.Normalization(name="unit")
        unit.adapt(3 + 2 * np.random.default_rng(1).normal(size=(20, 42)).astype("float32"))
        h = unit(h)
    if name == "chosen":
        h = layers.Lambda(lambda x: ops.where(ops.sum(x) > 0, 2 * x, x), name="chosen")(h)
    if name == "spectral":
        h = layers.SpectralNormalization(layers.Dense(8, activation="tanh", name="c"), name="unit")(h)
    return keras.Model(tokens, layers.Dense(4, name="out")(h))


class Likeness(layers.Layer):
    """What each vector shares with those of a table."""

    def __init__(self, table: Any, **options: Any) -> None:
        super().__init__(**options)
        self.table = table

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.table.embeddings))


def looked_up(kind: str | None, zero: int, name: str) -> Result:
    """A table that is cut by the features, and a last batch that does not divide."""
    fresh()
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, (13, 7)).astype("int32")
    y = x if name == "tied" else rng.integers(0, 4, 13).astype("int32")
    rules: dict[str, tuple[str | None, ...]] = {".*table/embeddings": (None, "model")}
    with scope(_strategy(kind, zero, rules)):
        model = _crossed(_tables(name), _sgd(momentum=0.9))
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return {"history": history, **told(model)}


def few(kind: str | None, zero: int) -> Result:
    """Fewer rows than devices."""
    fresh()
    with scope(_strategy(kind, zero)):
        model = _crossed(regularized(), _adam())
    return _fitted_on_few(model)


def _fitted_on_few(model: Any) -> Result:
    x, y = rows(5)
    return {**_fitted(model, x, y, batch_size=2), "predict": model.predict(x, batch_size=3, verbose=0)}


def several(kind: str | None, zero: int) -> Result:
    """Three steps an execution, and what is left in the last; plain Keras on torch has one."""
    fresh()
    executed: list[int] = []
    ends = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: executed.append(batch))
    x, y = rows()
    with scope(_strategy(kind, zero)):
        model = _crossed(regularized(), _adam(), steps_per_execution=1 if kind is None else 3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
            found = _fitted(model, x, y, callbacks=[ends])
            found["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
    steps = -(-ROWS // BATCH)
    assert len(executed) == (steps if kind is None else -(-steps // 3))
    return found


def few_pictures(kind: str | None, zero: int) -> Result:
    """The same where TensorFlow's kernels refuse no rows, or end the process: pooling's gradient by oneDNN."""
    fresh()
    with scope(_strategy(kind, zero)):
        model = keras.Sequential(
            [
                *(layers.Input((12,)), layers.Reshape((2, 6, 1)), layers.Conv2D(4, 1, activation="tanh")),
                *(layers.BatchNormalization(epsilon=0.3), layers.MaxPooling2D((1, 2)), layers.Flatten()),
                *(layers.Dense(8, name="a"), layers.Dense(CLASSES, name="b")),
            ]
        )
        _crossed(model, _sgd())
    return _fitted_on_few(model)


def boarded(kind: str | None, zero: int, folder: str) -> list[str]:
    """TensorBoard on every process; where this process's callback wrote, as it was put back."""
    fresh()
    x, y = rows()
    with scope(_strategy(kind, zero)):
        model = _crossed(plain(), _adam())
    board = keras.callbacks.TensorBoard(folder)
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[board])
    return [board.log_dir]


def streamed(kind: str | None, zero: int, source: str) -> Result:
    fresh()
    x, y = rows()
    with scope(_strategy(kind, zero)):
        model = _crossed(plain(), _adam())
        if source == "arrays":
            history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
        else:
            import tensorflow as tf

            history = model.fit(
                tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH), shuffle=False, verbose=0
            ).history
    return {"history": history, **told(model)}


def raising() -> None:
    """A program of two processes. The data of one raises in the second step."""
    x, y = rows()

    class Faulty(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, k: int) -> Any:
            if k >= 2 and not is_first():
                raise OSError("the disk of process 1 is gone")
            return x[:BATCH], y[:BATCH]

    with unidist.DataParallel(zero=1).scope():
        model = _crossed(plain(), _adam())
    model.fit(Faulty(), verbose=0)

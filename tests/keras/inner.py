"""Losses of Keras's that are called where Keras's trainer does not call them: inside of losses, layers, regularizers,
metrics and steps; and losses with a `__call__` of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch
from keras import layers, losses, ops

import unidist
from tests.support.runs import Result, fresh, scope, strategy, told
from unidist.keras.patching.compat import set_keras_mask

ROWS, BATCH, WIDTH, STEPS = 22, 8, 6, 3  # three batches, the last of six rows
RULES: dict[str, tuple[str | None, ...]] = {".*a/kernel": (None, "model"), ".*z/kernel": ("model", None)}

bce = losses.BinaryCrossentropy(from_logits=True)
mae = losses.MeanAbsoluteError()


# losses ---------------------------------------------------------------------------------------------------------------


def both(y: Any, p: Any) -> Any:
    return bce(y, p) + 0.5 * mae(y, p)


def summed(y: Any, p: Any) -> Any:
    return 0.1 * losses.MeanSquaredError(reduction="sum")(y, p) + ops.square(bce(y, p))


def each_and_all(y: Any, p: Any) -> Any:
    """A number for each row, weighed by a number of all rows."""
    return ops.mean(ops.square(y - p), axis=-1) * (1.0 + mae(y, p))


def each_of_inner(y: Any, p: Any) -> Any:
    """What an inner loss gives for each row, and a mean of it."""
    rows = losses.MeanSquaredError(reduction="none")(y, p)
    return rows + bce(y, p)


def weighed(y: Any, p: Any) -> Any:
    """Weights of the loss's own making."""
    weights = ops.mean(y, axis=-1) + 0.5
    return mae(y, p, sample_weight=weights) + losses.Huber(reduction="mean_with_sample_weight")(y, p, weights)


def masked(y: Any, p: Any) -> Any:
    """A mask that Keras has on what it is given."""
    p = p * 1.0
    set_keras_mask(p, ops.mean(y, axis=-1) > 0.4)
    return mae(y, p) + 0.3 * losses.MeanSquaredError(reduction="mean")(y, p)


def rowwise(y: Any, p: Any) -> Any:
    return ops.mean(ops.abs(y - p), axis=-1) + bce(y, p)


class Flat(losses.Loss):
    """More numbers than rows."""

    def call(self, y: Any, p: Any) -> Any:
        return 0.02 * ops.reshape(ops.square(y - p), (-1,)) * mae(y, p)


class Both(losses.Loss):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = [losses.MeanSquaredError(), losses.LogCosh()]

    def call(self, y: Any, p: Any) -> Any:
        return self.inner[0](y, p) + 0.2 * self.inner[1](y, p)


class Outer(losses.Loss):
    """Three deep."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = Both()

    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.abs(y - p), axis=-1) + self.inner(y, p) * bce(y, p)


class Wrapped(losses.BinaryCrossentropy.__mro__[1]):  # type: ignore[misc]
    """Keras's wrapper of functions, around a loss."""


class Inner(losses.Loss):
    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.abs(y - p), axis=-1) * bce(y, p)


class Centred(losses.Loss):
    """An inner loss that looks at the rows of all by itself."""

    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.square(p - ops.mean(p, axis=0)))


def around_centred(y: Any, p: Any) -> Any:
    return Centred()(y, p) + mae(y, p)


class Calling(losses.Loss):
    """A `__call__` of its own around Keras's."""

    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.square(y - p), axis=-1)

    def __call__(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return 2.0 * super().__call__(y, p, sample_weight) + 0.1 * bce(y, p)


class Reducing(losses.MeanSquaredError):
    """A `__call__` of its own that weighs and reduces."""

    def __call__(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        each = self.call(ops.convert_to_tensor(y), ops.convert_to_tensor(p))
        if sample_weight is None:
            return ops.mean(each)
        sample_weight = ops.convert_to_tensor(sample_weight)
        return ops.sum(each * sample_weight) / ops.sum(sample_weight)


class Deep(Calling):
    """A `__call__` around one that is overridden."""

    def __call__(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return super().__call__(y, p, sample_weight) + Reducing()(y, p, sample_weight)


def of_calling(y: Any, p: Any) -> Any:
    return Calling()(y, p) + Reducing()(y, p)


LATE = {"on": False}


class Late(losses.Loss):
    """Calls an inner loss from the second epoch on."""

    def call(self, y: Any, p: Any) -> Any:
        each = ops.mean(ops.square(y - p), axis=-1)
        return each + mae(y, p) * each if LATE["on"] else each


# layers ---------------------------------------------------------------------------------------------------------------


class Endpoint(layers.Layer):
    """keras.io's: it is given the targets, adds a loss of its own and keeps a metric."""

    def __init__(self, loss: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.loss_fn = loss or losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="inner_acc")
        self.mean = keras.metrics.Mean(name="inner_mean")
        self.total = keras.metrics.Sum(name="inner_sum")
        self.rows = keras.metrics.Sum(name="inner_rows")
        self.wrapping = keras.metrics.MeanMetricWrapper(losses.MeanSquaredError(), name="inner_wrapping")
        self.auc = keras.metrics.AUC(name="inner_auc", num_thresholds=10)

    def call(self, targets: Any, logits: Any, sample_weight: Any = None) -> Any:
        loss = self.loss_fn(targets, logits, sample_weight)
        self.add_loss(loss)
        self.accuracy.update_state(targets, logits, sample_weight)
        self.auc.update_state(targets, ops.sigmoid(logits))
        self.mean.update_state(loss)
        self.total.update_state(loss)
        self.rows.update_state(logits[:, 0], sample_weight)
        self.wrapping.update_state(targets, logits)
        return ops.softmax(logits)


def endpoint(loss: Any = None, weights: bool = False) -> Any:
    x, y = layers.Input((6,)), layers.Input((4,))
    more = [layers.Input(())] if weights else []
    logits = layers.Dense(4, name="z")(layers.Dense(WIDTH, "tanh", name="a")(x))
    return keras.Model([x, y, *more], Endpoint(loss, name="endpoint")(y, logits, *more), name="endpoints")


class Adding(layers.Layer):
    """Adds a loss, or gives back what it has computed of one."""

    def __init__(self, how: str, **options: Any) -> None:
        super().__init__(**options)
        self.how = how

    def call(self, x: Any) -> Any:
        zeros = ops.zeros_like(x)
        loss = mae(zeros, x)
        if self.how == "scale":
            return x / (0.5 + loss)
        if self.how == "several":
            self.add_loss(ops.mean(ops.square(x)))
            self.add_loss(0.1 * losses.MeanSquaredError(reduction="sum")(zeros, x) * loss)
        if self.how == "batches":
            two = ops.concatenate([x, 2 * x])
            self.add_loss(mae(ops.zeros_like(two), two) + Both()(ops.ones_like(two), two))
        if self.how == "custom":
            self.add_loss(Outer()(zeros, x) + Centred()(zeros, x))
        self.add_loss(loss)
        return x


def stack(*middle: Any, kind: Any = keras.Sequential, **options: Any) -> Any:
    return kind(
        [keras.Input((6,)), layers.Dense(WIDTH, "tanh", name="a"), *middle, layers.Dense(4, name="z", **options)],
        name="stack",
    )


def of_weights(w: Any) -> Any:
    return 0.1 * mae(ops.zeros_like(w), w) + 0.01 * losses.MeanSquaredError(reduction="sum")(ops.zeros_like(w), w)


def of_activity(x: Any) -> Any:
    return 0.1 * mae(ops.zeros_like(x), x) + 0.1 * ops.mean(x * x)


class Own(keras.Model):
    """A call of its own that adds a loss; two outputs."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.a = layers.Dense(WIDTH, "tanh", name="a")
        self.z = layers.Dense(4, name="z")

    def call(self, x: Any) -> Any:
        h = self.a(x)
        self.add_loss(0.2 * mae(ops.ones_like(h), h))
        return self.z(h)


def two(kind: Any = keras.Model) -> Any:
    x = layers.Input((6,))
    h = layers.Dense(WIDTH, "tanh", name="a")(x)
    return kind(x, {"p": layers.Dense(4, name="z")(h), "q": layers.Dense(4, name="w")(h)}, name="two")


def sequence() -> Any:
    return keras.Sequential(
        [keras.Input((5, 3)), layers.Masking(), layers.Dense(WIDTH, "tanh", name="a"), layers.Dense(2, name="z")],
        name="sequence",
    )


# steps ----------------------------------------------------------------------------------------------------------------


class Stepping(keras.Sequential):
    """A step with losses of Keras's, of which some are of other rows than the batch's."""

    how = ""

    def train_step(self, batch: Any) -> Any:
        x, y = batch[:2]
        p = self(x, training=True)
        loss = losses.MeanSquaredError()(y, p) + 0.5 * Outer()(y, p)
        if self.how == "compiled":
            loss = self.compute_loss(x, y, p) + 0.1 * loss
        if self.how == "batches":
            two = ops.concatenate([y, y]), ops.concatenate([p, 2 * p])
            loss = loss + 0.002 * losses.MeanSquaredError(reduction="sum")(*two)
        if self.how == "weights":
            w, b = self.layers[0].kernel, self.layers[0].bias
            loss = loss + 0.1 * losses.MeanSquaredError(reduction="sum")(ops.zeros_like(w), w)
            loss = loss + 0.1 * mae(ops.zeros_like(b), b) + losses.MeanSquaredError(reduction="sum")(w[:3] * 0, w[:3])
        self.zero_grad()
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        self._loss_tracker.update_state(loss)
        return {"loss": loss, "own": mae(y, p)}


def stepping(how: str = "", *middle: Any) -> Any:
    model = stack(*middle, kind=Stepping)
    model.how = how
    return model


class Computing(keras.Sequential):
    def compute_loss(  # type: ignore[override]
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.3 * both(y, y_pred) + Deep()(y, y_pred)


class OfTwo(keras.Model):
    def compute_loss(  # type: ignore[override]
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.3 * both(y["p"], y_pred["q"])


class Measuring(keras.metrics.Mean):
    """A Mean of a loss."""

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return super().update_state(both(y, p))


class Testing(keras.Sequential):
    def test_step(self, batch: Any) -> Any:
        x, y = batch[:2]
        p = self(x, training=False)
        return {"loss": mae(y, p) + Deep()(y, p), "outer": Outer()(y, p)}


def graph() -> Any:
    x = layers.Input((6,))
    h = layers.Dense(WIDTH, "tanh", name="a")(x)
    number = layers.Lambda(lambda t: mae(t[0], t[1]))([x, h])
    return keras.Model(x, layers.Dense(4, name="z")(h / (1 + number)), name="graph")


def rematerialized() -> Any:
    with keras.RematScope(mode="full"):
        return stack(Adding("several", name="adding"))


class Measured(keras.Sequential):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "more": both(y, y_pred)}


Case = tuple[Callable[[], Any], Any]
CASES: dict[str, Case] = {
    "both": (stack, both),
    "summed": (stack, summed),
    "each and all": (stack, each_and_all),
    "each of inner": (stack, each_of_inner),
    "weighed": (stack, weighed),
    "masked": (stack, masked),
    "flat": (stack, lambda: Flat(reduction="sum")),
    "three deep": (stack, lambda: Outer(reduction="mean_with_sample_weight")),
    "around centred": (stack, around_centred),
    "wrapped": (stack, lambda: Wrapped(bce)),
    "late": (stack, Late),
    "calling": (stack, lambda: Calling(reduction="sum")),
    "reducing": (stack, Reducing),
    "deep": (stack, Deep),
    "of calling": (stack, of_calling),
    "endpoint": (endpoint, None),
    "endpoint of deep": (lambda: endpoint(Deep()), None),
    "endpoint weighed": (lambda: endpoint(losses.MeanSquaredError(reduction="mean_with_sample_weight"), True), None),
    "endpoint and loss": (lambda: endpoint(Both()), both),
    "scale": (lambda: stack(Adding("scale", name="adding")), both),
    "several": (lambda: stack(Adding("several", name="adding")), both),
    "batches": (lambda: stack(Adding("batches", name="adding")), both),
    "custom": (lambda: stack(Adding("custom", name="adding")), both),
    "remat": (rematerialized, both),
    "weights": (lambda: stack(kernel_regularizer=of_weights), "mse"),
    "activity": (lambda: stack(activity_regularizer=of_activity), "mse"),
    "lambda": (graph, both),
    "own": (Own, both),
    "two": (two, {"p": both, "q": Outer}),
    "two calling": (two, {"p": Calling, "q": "mse"}),
    "two computing": (lambda: two(OfTwo), {"p": both, "q": "mse"}),
    "sequence": (sequence, rowwise),
    "sequence of losses": (sequence, lambda: Inner(reduction="mean")),
    "sequence calling": (sequence, Calling),
    "step": (stepping, "mse"),
    "step of batches": (lambda: stepping("batches"), "mse"),
    "step of weights": (lambda: stepping("weights"), "mse"),
    "step of compiled": (lambda: stepping("compiled"), Deep),
    "step of a layer": (lambda: stepping("", Adding("scale", name="adding")), "mse"),
    "test step": (lambda: stack(kind=Testing), "mse"),
    "compute_loss": (lambda: stack(kind=Computing), both),
    "compute_metrics": (lambda: stack(kind=Measured), Outer),
}
# Keras refuses weights of rows beside numbers that are not of rows.
UNWEIGHED = ("flat",)


def data(name: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, 6)).astype("float32")
    y = (rng.uniform(size=(ROWS, 4)) > 0.4).astype("float32")
    if name.startswith("endpoint"):
        more = [rng.uniform(0.1, 2, ROWS).astype("float32")] if "weighed" in name else []
        return [x, y, *more], y if name == "endpoint and loss" else None
    if name.startswith("sequence"):
        x = rng.normal(size=(ROWS, 5, 3)).astype("float32")
        x[rng.uniform(size=(ROWS, 5)) > 0.6] = 0
        return x, (rng.uniform(size=(ROWS, 5, 2)) > 0.4).astype("float32")
    if name.startswith("two"):
        return x, {"p": y, "q": 1 - y}
    return x, y


def of_class(loss: Any) -> Any:
    if isinstance(loss, dict):
        return {key: of_class(value) for key, value in loss.items()}
    return loss() if isinstance(loss, type) or getattr(loss, "__name__", "") == "<lambda>" else loss


class Switching(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        LATE["on"] = epoch > 0


def trained(kind: str | None, zero: int, name: str, weighted: bool) -> Result:
    """Trains, evaluates; `kind`: None for one device."""
    fresh()
    LATE["on"] = False
    build, loss = CASES[name]
    with scope(None if kind is None else strategy(kind, RULES, zero=zero)), unidist.ledger() as book:
        model = build()
        x, y = data(name)
        rng = np.random.default_rng(2)
        shape = (ROWS, 5) if name.startswith("sequence") else ROWS
        weights = rng.uniform(0.1, 3.0, shape).astype("float32") if weighted and y is not None else None
        if weighted and isinstance(y, dict):
            weights = dict.fromkeys(y, weights)
        metrics = [both, mae, Both(name="of_loss"), Measuring(name="measuring")]
        if y is None or isinstance(y, dict) or name.startswith("sequence"):
            metrics = None
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), of_class(loss), metrics=metrics)
        history = model.fit(
            x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, sample_weight=weights, callbacks=[Switching()]
        ).history
    return {
        "history": history,
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True, sample_weight=weights),
        "_sent": len(book.events),
        **told(model),
    }

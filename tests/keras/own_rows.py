"""Steps of the user's own on torch that compute with rows by themselves, and what the processes of their tests run.

They have losses by hand, numbers for the logs, gradients of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch
from keras import layers, ops

import unidist
from tests.support.runs import Result, fresh, is_first, scope, strategy, told

ROWS, BATCH, WIDTH = 22, 8, 6  # three batches, the last of six rows: on four shards two, two, two and none
RULES: dict[str, tuple[str | None, ...]] = {".*/a/kernel": (None, "model"), ".*/b/kernel": ("model", None)}


class Stepping(keras.Model):
    """Its step computes the loss as a case says."""

    def __init__(self, case: str) -> None:
        super().__init__(name="own")
        middle = CASES[case].get("layer", lambda: layers.Activation("linear"))
        self.a, self.middle = layers.Dense(8, activation="tanh", name="a"), middle()
        self.b, self.adding = layers.Dense(3, name="b"), layers.Add()
        self.seeds = keras.random.SeedGenerator(11)
        self.told = {kind.name: kind for kind in (keras.metrics.Mean(name="mean"), keras.metrics.Sum(name="sum"))}
        self.error = keras.metrics.MeanAbsoluteError(name="mae")
        self.steps_made = 0
        self._case = CASES[case]

    def call(self, x: Any, training: bool = False) -> Any:
        return self.b(self.middle(self.a(x), training=training))

    @property
    def metrics(self) -> list[Any]:
        return [*self.told.values(), self.error]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss = self._case["loss"](self, x, y, weight)
        if "gradients" in self._case:
            self._case["gradients"](self, loss)
        else:
            loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return self.numbers(x, y, loss)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        return self.numbers(x, y, self._case.get("tested", self._case["loss"])(self, x, y, weight))

    def numbers(self, x: Any, y: Any, loss: Any) -> dict[str, Any]:
        with torch.no_grad():
            found = self(x)
            self.told["mean"].update_state(loss)
            self.told["sum"].update_state(loss)
            self.error.update_state(y, found)
            return {
                "loss": loss.detach(),
                **{metric.name: metric.result() for metric in self.metrics},
                **self._case.get("logs", lambda model, x, y, p: {})(self, x, y, found),
            }


def squares(model: Any, x: Any, y: Any, weight: Any) -> Any:
    return ((y - model(x, training=True)) ** 2).mean()


def weighted(model: Any, x: Any, y: Any, weight: Any) -> Any:
    each = keras.losses.MeanSquaredError(reduction="none")(y, model(x, training=True))
    return (each * weight).sum() / weight.sum()


def masked(model: Any, x: Any, y: Any, weight: Any) -> Any:
    p = model(x, training=True)
    counts = ops.cast(ops.abs(y) > 0.5, "float32")
    return ops.sum(counts * ops.square(y - p)) / ops.sum(counts)


def of_keras(model: Any, x: Any, y: Any, weight: Any) -> Any:
    return keras.losses.MeanSquaredError()(y, model(x, training=True))


def with_penalty(model: Any, x: Any, y: Any, weight: Any) -> Any:
    penalty = sum(ops.sum(ops.square(v)) for v in model.trainable_weights)
    return of_keras(model, x, y, weight) + 0.01 * penalty + sum(model.losses)


def by_the_rows(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """A mean by hand of what Keras has summed."""
    return keras.losses.MeanSquaredError(reduction="sum")(y, model(x, training=True)) / ops.shape(x)[0]


def by_the_length(model: Any, x: Any, y: Any, weight: Any) -> Any:
    return keras.losses.MeanSquaredError(reduction="sum")(y, model(x, training=True)) / len(x)


def halves(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """Two views go through the model in one batch, and come apart again."""
    both = model(ops.concatenate([x, 0.5 * x], axis=0), training=True)
    first, second = ops.split(both, 2, axis=0)
    rows = ops.shape(x)[0]
    return ops.mean(ops.square(first - second)) + ops.mean(ops.abs(both[:rows] - y)) + 0.1 * ops.mean(both[rows:])


def likeness(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """Two views of each row, behind each other in one batch."""
    p = ops.normalize(model(ops.concatenate([x, -0.5 * x + 0.1], axis=0), training=True), axis=-1)
    rows = ops.shape(x)[0]
    logits = ops.matmul(p, ops.transpose(p)) - 10.0 * ops.eye(2 * rows)
    labels = ops.concatenate([ops.arange(rows) + rows, ops.arange(rows)])
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def two_batches(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """A loss of Keras's on two batches behind each other, and a metric too."""
    p = model(ops.concatenate([x, 0.5 * x], axis=0), training=True)
    both = ops.concatenate([y, 0.5 * y], axis=0)
    model.error.update_state(both, p.detach())
    return keras.losses.Huber()(both, p) + 0.1 * ops.max(p)


class Centred(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0, keepdims=True)


def two_batches_of_rows(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """The same, where each row may be treated alone."""
    p = model(ops.concatenate([x, 0.5 * x], axis=0), training=True)
    return keras.losses.Huber()(ops.concatenate([y, 0.5 * y], axis=0), p)


def mixed_up(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """H. Zhang, M. Cisse, Y. N. Dauphin and D. Lopez-Paz, "mixup" (2018)."""
    order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=model.seeds)
    share = keras.random.beta((), 0.4, 0.4, seed=model.seeds)
    x, y = (share * one + (1 - share) * ops.take(one, order, axis=0) for one in (x, y))
    return squares(model, x, y, weight)


def noisy(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """Its noise is that of one device."""
    noise = keras.random.normal(ops.shape(x), seed=model.seeds)
    p = model(model.adding([x, 0.3 * noise]), training=True)
    return squares(model, noise, y, weight) + ops.mean(ops.abs(p - y))


def drawn(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """Noise of torch's and of NumPy's own generators."""
    noise = torch.randn(*ops.shape(x)) + float(np.random.normal())
    return squares(model, x + 0.3 * noise, y, weight)


def of_wholes(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """Beside its loss it follows a number that is the same on all devices."""
    model.told["mean"].update_state(ops.norm(model.a.kernel.value))
    return of_keras(model, x, y, weight)


def drawn_later(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """From the third step on."""
    if int(model.optimizer.iterations.value) < 2:
        return squares(model, x, y, weight)
    return drawn(model, x, y, weight)


def drawn_late(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """A loss of Keras's, and one by hand from the third step on, which begins again."""
    if int(model.optimizer.iterations.value) < 2:
        return of_keras(model, x, y, weight)
    return drawn(model, x, y, weight)


class Apart(keras.callbacks.Callback):
    """Generators of the processes go apart, as by an augmentation of each one's own rows."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            torch.manual_seed(int(is_first()))


def attacked(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """I. J. Goodfellow, J. Shlens and C. Szegedy, "Explaining and Harnessing Adversarial Examples" (2015)."""
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(squares(model, x, y, weight), x)
    return squares(model, x.detach() + 0.1 * torch.sign(slope), y, weight)


def attacked_behind(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """The same, by a backward and what it leaves at the inputs."""
    x = x.detach().clone()
    x.requires_grad = True
    squares(model, x, y, weight).backward()
    slope = x.grad
    model.zero_grad()
    return squares(model, x.detach() + 0.1 * torch.sign(slope), y, weight)


def smooth(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """A penalty on the gradient between two rows.

    Source: I. Gulrajani and others, "Improved Training of Wasserstein GANs" (2017), arXiv:1704.00028.
    """
    share = keras.random.uniform((ops.shape(x)[0], 1), seed=model.seeds)
    between = (share * x + (1 - share) * (x + 1.0)).detach().requires_grad_()
    p = model(between, training=True)
    (slope,) = torch.autograd.grad(p, between, grad_outputs=torch.ones_like(p), create_graph=True)
    norm = torch.sqrt((slope**2).sum(dim=1) + 1e-6)
    return ops.mean(p) - ops.mean(model(x, training=True)) + ((norm - 1.0) ** 2).mean()


class Rounded(torch.autograd.Function):
    """Gradients pass as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(8 * x) / 8

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def quantized(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """Weights, and what they meet, are rounded: Y. Bengio, N. Leonard and A. Courville (2013), arXiv:1308.3432."""
    hidden = Rounded.apply(model.middle(model.a(x)))
    p = ops.matmul(hidden, Rounded.apply(model.b.kernel.value)) + model.b.bias
    return ops.mean(ops.square(y - p)) + 0.1 * of_keras(model, x, y, weight)


def later(model: Any, x: Any, y: Any, weight: Any) -> Any:
    """By hand from the third step on: counted by the optimizer, which all ranks share."""
    if int(model.optimizer.iterations.value) < 2:
        return of_keras(model, x, y, weight)
    return squares(model, x, y, weight)


def asked(model: Any, loss: Any) -> None:
    weights = list(model.trainable_weights)
    for v, gradient in zip(weights, torch.autograd.grad(loss, [v.value for v in weights]), strict=True):
        v.value.grad = gradient


def extremes(model: Any, x: Any, y: Any, p: Any) -> dict[str, Any]:
    return {
        "largest": ops.max(p),
        "median": ops.median(p),
        "spread": ops.std(p, axis=0).sum(),
        "rows": ops.sum(ops.ones((ops.shape(x)[0],))),
        "rate": ops.convert_to_tensor(model.optimizer.learning_rate),
    }


CASES: dict[str, dict[str, Callable[..., Any]]] = {
    "squares": {"loss": squares},
    "weighted": {"loss": weighted},
    "masked": {"loss": masked},
    "square of a loss": {"loss": lambda *given: 0.5 * of_keras(*given) ** 2 + ops.sqrt(of_keras(*given))},
    "penalty": {"loss": with_penalty, "layer": lambda: layers.Dense(8, activity_regularizer="l2", name="m")},
    "norms": {"loss": squares, "layer": lambda: layers.BatchNormalization(name="m")},
    "by the rows": {"loss": by_the_rows},
    "by the length": {"loss": by_the_length},
    "halves": {"loss": halves, "layer": lambda: layers.BatchNormalization(name="m", epsilon=0.3)},
    "likeness": {"loss": likeness},
    "two batches": {"loss": two_batches},
    "mixed up": {"loss": mixed_up},
    "noisy": {"loss": noisy},
    "drawn": {"loss": drawn, "tested": squares},
    "drawn later": {"loss": drawn_later, "tested": squares, "apart": Apart},
    "attacked": {"loss": attacked, "tested": squares},
    "attacked behind": {"loss": attacked_behind, "tested": squares},
    "smooth": {"loss": smooth, "tested": squares},
    "quantized": {"loss": quantized},
    "later": {"loss": later, "layer": lambda: layers.BatchNormalization(name="m", epsilon=0.3)},
    "drawn late": {"loss": drawn_late, "tested": squares},
    "two batches of rows": {"loss": two_batches_of_rows},
    "two batches that mix": {"loss": two_batches_of_rows, "layer": lambda: Centred(name="m")},
    "of wholes": {"loss": of_wholes},
    "asked": {"loss": squares, "gradients": asked},
    "tested": {"loss": of_keras, "tested": lambda *given: ops.max(ops.abs(squares(*given))), "logs": extremes},
    "extremes": {"loss": squares, "logs": extremes},
}


class Measuring(keras.Model):
    """Keras's step, and numbers of several rows beside its metrics."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.a, self.b = layers.Dense(8, activation="tanh", name="a"), layers.Dense(3, name="b")
        self.total = keras.metrics.Sum(name="total")

    def call(self, x: Any) -> Any:
        return self.b(self.a(x))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.total.update_state(ops.abs(y_pred))
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        each = ops.max(y_pred, axis=0)
        return {**found, "largest": ops.max(each), "apart": ops.max(each) - ops.min(y_pred)}


class Each(keras.callbacks.Callback):
    """The logs of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append({name: float(value) for name, value in (logs or {}).items()})


def stepped(kind: str | None, zero: int, case: str) -> Result:
    """Two epochs of three batches, the last one uneven."""
    fresh()
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(ROWS, width)).astype("float32") for width in (WIDTH, 3))
    weight = rng.uniform(0.5, 2.0, size=(ROWS,)).astype("float32")
    each = Each()
    options = {} if kind is None else {"zero": zero}
    with scope(strategy(kind, RULES, **options)), unidist.ledger() as sent:
        model = Measuring() if case == "measuring" else Stepping(case)
        model(x[:2])
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss="mse", metrics=["mae", "r2_score"])
        fitted = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        callbacks = [each, *([Apart()] if "apart" in CASES.get(case, {}) else [])]
        history = model.fit(x, y, sample_weight=weight, callbacks=callbacks, **fitted).history
        tested = model.evaluate(x, y, sample_weight=weight, batch_size=BATCH, verbose=0, return_dict=True)
        found = told(model)
    return {
        **found,
        "history": history,
        "outputs": each.logs,
        "evaluate": tested,
        "_bytes": sent.bytes() if kind else 0,
    }


def refused(kind: str, zero: int, case: str) -> str:
    try:
        stepped(kind, zero, case)
    except unidist.UnidistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_cases(kind: str | None, zero: int, cases: list[str]) -> dict[str, Result]:
    return {case: stepped(kind, zero, case) for case in cases}

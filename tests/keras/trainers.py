"""Layers that several trainers work with in turn, by layouts that are found; what the processes of their tests run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import unidist
from tests.support.runs import Result, fresh, strategy

ROWS, BATCH, GROUPS, FEATURES, CLASSES = 28, 14, 7, 6, 4
Scope = Callable[[], Any]


def _classifier(name: str, width: int) -> keras.Model:
    made = [layers.Input((FEATURES,)), layers.Dense(width, "relu"), layers.Dense(CLASSES, "softmax")]
    return keras.Sequential(made, name=name)


class Distiller(keras.Model):  # type: ignore[misc]
    """Teaches a student what the targets and a teacher say, which its own call does not reach."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__(name="distiller")
        self.student, self.teacher = student, teacher
        self.hard, self.soft = keras.losses.CategoricalCrossentropy(), keras.losses.KLDivergence()

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **options: Any) -> Any:
        return 0.1 * self.hard(y, y_pred) + 0.9 * self.soft(self.teacher(x, training=False), y_pred)


class Inner(keras.Model):  # type: ignore[misc]
    """Gives its hidden features' mean instead, where it is asked to: of a part it would be another number."""

    def __init__(self) -> None:
        super().__init__(name="inner")
        self.up, self.down = layers.Dense(16, "tanh"), layers.Dense(CLASSES, "softmax")

    def build(self, shape: Any) -> None:
        self.up.build(shape)
        self.down.build((*shape[:-1], 16))

    def call(self, x: Any, hidden: bool = False) -> Any:
        h = self.up(x)
        return ops.mean(h, axis=-1, keepdims=True) if hidden else self.down(h)


class Around(keras.Model):  # type: ignore[misc]
    """Works with the hidden features of a model that was trained by itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__(name="around")
        self.inner, self.head = inner, layers.Dense(CLASSES, "softmax")

    def build(self, shape: Any) -> None:
        self.head.build((shape[0], 1))

    def call(self, x: Any) -> Any:
        return self.head(self.inner(x, hidden=True)) + 0.1 * self.inner(x)


class Deviation(layers.Layer):  # type: ignore[misc]
    """Beside each row how rows of several groups differ, as in a critic of StyleGAN's: a batch must divide."""

    def call(self, x: Any) -> Any:
        groups = ops.reshape(x, (GROUPS, -1, x.shape[-1]))
        spread = ops.mean(ops.sqrt(ops.var(groups, axis=0) + 1e-3), axis=-1, keepdims=True)
        return ops.concatenate([x, ops.tile(spread, (GROUPS, 1))], axis=-1)

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape[:-1], shape[-1] + 1)


class Run:
    """Trains models in turn, and keeps what they say."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(ROWS, FEATURES)).astype("float32")
        self.y = np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, ROWS)]
        self.said: Result = {"history": [], "predict": []}
        self.models: list[Any] = []

    def fit(self, *models: Any) -> None:
        for model in models:
            if not any(model is one for one in self.models):
                self.models.append(model)
                model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "categorical_crossentropy")
            options: Any = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
            self.said["history"].append(model.fit(self.x, self.y, **options).history["loss"])

    def predict(self, model: Any) -> None:
        self.said["predict"].append(model.predict(self.x, batch_size=BATCH, verbose=0))


def distilled(run: Run, scope: Scope) -> None:
    with scope():
        teacher, student = _classifier("teacher", 20), _classifier("student", 8)
        run.fit(teacher, Distiller(student, teacher), teacher, student)
    run.predict(teacher)
    run.predict(student)


def distilled_elsewhere(run: Run, scope: Scope) -> None:
    """Under another strategy over the same devices, which finds layouts of its own."""
    with scope():
        teacher = _classifier("teacher", 20)
        run.fit(teacher)
    with scope():
        distiller = Distiller(_classifier("student", 8), teacher)
        run.fit(distiller)
    run.fit(teacher, distiller)


def heads(run: Run, scope: Scope) -> None:
    """The backbone's last layer is the first of a pair with one head, and meets the other whole."""
    with scope():
        inputs = layers.Input((FEATURES,))
        features = layers.Dense(16, "tanh")(layers.Dense(12, "relu")(inputs))
        one = keras.Model(inputs, layers.Dense(CLASSES, "softmax")(features), name="one")
        normed = layers.LayerNormalization()(layers.Softmax()(features))
        other = keras.Model(inputs, layers.Dense(CLASSES, "softmax")(normed), name="other")
        run.fit(one, other, one, other)


def adversaries(run: Run, scope: Scope) -> None:
    """A critic that is trained by itself, and stays as it is where its generator is trained through it."""
    with scope():
        above = [Deviation(), layers.Dense(16, "relu"), layers.Dense(CLASSES, "softmax")]
        critic = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(16, "relu"), layers.Dense(8), *above])
        generator = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(12, "relu"), layers.Dense(FEATURES)])
        both = keras.Sequential([layers.Input((FEATURES,)), generator, critic], name="both")
        for _ in range(2):
            critic.trainable = True
            run.fit(critic)
            critic.trainable = False
            run.fit(both)
    run.predict(critic)


def part_and_whole(run: Run, scope: Scope) -> None:
    """A part that the whole was trained with, and one that was trained before it; features of both."""
    with scope():
        part = keras.Sequential([layers.Input((FEATURES,)), layers.Dense(16, "tanh"), layers.Dense(8, "tanh")])
        whole = keras.Sequential([part, layers.Dense(12, "relu"), layers.Dense(CLASSES, "softmax")], name="whole")
        run.fit(whole)
        run.predict(part)
        larger = keras.Sequential([layers.Input((FEATURES,)), whole, layers.Dense(CLASSES, "softmax")], name="larger")
        run.fit(larger, whole)
        run.predict(keras.Model(part.inputs, part.layers[0].output))
        hidden = keras.Model(whole.inputs, whole.layers[1].output)
        run.predict(hidden)
        run.fit(keras.Sequential([hidden, layers.Dense(CLASSES, "softmax")], name="of features"), whole)


def hidden(run: Run, scope: Scope) -> None:
    with scope():
        inner = Inner()
        inner.build((None, FEATURES))
        around = Around(inner)
        around.build((None, FEATURES))
        run.fit(inner, around, inner)


CASES: dict[str, Callable[[Run, Scope], None]] = {
    case.__name__: case for case in (distilled, distilled_elsewhere, heads, adversaries, part_and_whole, hidden)
}


def in_turn(where: dict[str, int] | str | None, name: str, zero: int = 0) -> Result:
    """What the trainings of a case say, and the weights of the first model.

    Args:
        where: the mesh on which layouts are found, or a kind of strategy; None: one device.
        name: of the case.
        zero: of the strategy.
    """
    fresh()
    run = Run()
    if where is None:
        CASES[name](run, contextlib.nullcontext)
        return {**run.said, "weights": {v.path: np.asarray(v) for v in run.models[0].weights}}
    with unidist.ledger() as book:
        if isinstance(where, str):
            CASES[name](run, lambda: strategy(where, zero=zero).scope())
        else:
            CASES[name](run, lambda: unidist.ModelParallel(unidist.Mesh(where), zero=zero).scope())
    first = unidist.describe(run.models[0])
    return {
        **run.said,
        "weights": unidist.gather_weights(run.models[0]),
        "sharded": sum(row.is_sharded for row in first.rows),
        "paired": sum("inputs come cut" in why for why in first.why.values()),
        "_sent": book.bytes(),
    }

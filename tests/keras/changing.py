"""Models that are changed after they were trained, or while they are; what the processes of their tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import unidist
from tests.keras.mixing import Center, center, contrastive
from tests.support.runs import Result, fresh, scope, strategy, told

# Full batches where a ragged one would be traced once more.
ROWS, BATCH, WIDTH = (13 if keras.config.backend() == "torch" else 16), 8, 8
RULES: dict[str, tuple[str | None, ...]] = {".*a/kernel": (None, "model"), ".*z/kernel": ("model", None)}


class Mode(layers.Layer):
    """Centres what it is given, along one of its dims, in its second mode."""

    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__(**options)
        self.dim = dim
        self.mode = 0

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=self.dim, keepdims=True) if self.mode else x


class Counting(keras.Sequential):
    """Counts its steps, and chooses nothing by their number."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps = 0

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().train_step(*args, **kwargs)


class Scaling(keras.optimizers.SGD):
    """Divides all gradients by the norm of all."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        norm = ops.sqrt(sum(ops.sum(ops.square(grad)) for grad in grads))
        return super().apply([grad / (norm + 1) for grad in grads], trainable_variables)


def _switching(layer: Mode) -> Any:
    """One mode in each epoch, the other in the next."""
    return keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs=None: setattr(layer, "mode", epoch % 2))


class Training:
    """One model in several trainings."""

    def __init__(self, *middle: Any) -> None:
        rng = np.random.default_rng(0)
        self.x, self.y = (rng.normal(size=(ROWS, size)).astype("float32") for size in (6, 4))
        first = [layers.Input((6,)), layers.Dense(WIDTH, "tanh", name="a")]
        self.model = keras.Sequential([*first, *middle, layers.Dense(4, name="z")], name="changing")
        self.histories: list[Any] = []
        self.compile()

    def compile(self, loss: Any = "mse", optimizer: Any = None, **options: Any) -> None:
        given = optimizer or keras.optimizers.Adam(0.01, epsilon=1e-3)
        self.model.compile(given, loss, **options)

    def fit(self, epochs: int = 1, **options: Any) -> None:
        sizes: Any = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0}
        self.histories.append(self.model.fit(self.x, self.y, **sizes, **options).history)


def recompiled() -> Training:
    """By the same optimizer."""
    run = Training()
    run.fit()
    run.compile("mae", run.model.optimizer, metrics=["mse"])
    run.fit()
    return run


def another_loss() -> Training:
    run = Training()
    run.fit()
    run.compile(contrastive, run.model.optimizer)
    run.fit()
    return run


def another_optimizer() -> Training:
    run = Training()
    run.fit()
    run.compile(optimizer=Scaling(0.1))
    run.fit()
    return run


def layer_added() -> Training:
    run = Training()
    run.fit()
    run.model.add(Center(name="center"))
    run.compile(optimizer=run.model.optimizer)
    run.fit()
    return run


def another_head() -> Training:
    run = Training()
    run.fit()
    run.model.pop()
    run.model.add(layers.Dense(4, name="z"))
    run.compile()
    run.fit(2)
    return run


def activation() -> Training:
    run = Training(layers.Dense(WIDTH, "tanh", name="middle"))
    run.fit()
    run.model.get_layer("middle").activation = center
    run.compile()
    run.fit()
    return run


def activity() -> Training:
    run = Training(layers.Dense(WIDTH, "tanh", name="middle"))
    run.fit()
    run.model.get_layer("middle").activity_regularizer = lambda x: 0.1 * ops.sum(ops.square(ops.mean(x, axis=0)))
    run.compile()
    run.fit()
    return run


def mode_between() -> Training:
    layer = Mode(0, name="mode")
    run = Training(layer)
    run.fit()
    layer.mode = 1
    run.fit()
    return run


def mode_in_training() -> Training:
    layer = Mode(0, name="mode")
    run = Training(layer)
    run.fit(3, callbacks=[_switching(layer)])
    return run


def features_in_training() -> Training:
    """A layer between a pair that looks at all features in its second mode."""
    layer = Mode(-1, name="mode")
    run = Training(layer)
    run.fit(3, callbacks=[_switching(layer)])
    return run


def features_often() -> Training:
    layer = Mode(-1, name="mode")
    run = Training(layer)
    run.fit(13, callbacks=[_switching(layer)])
    return run


def activation_in_training() -> Training:
    run = Training(layers.Dense(WIDTH, "tanh", name="middle"))
    middle = run.model.get_layer("middle")
    change = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs=None: setattr(middle, "activation", center if epoch else ops.tanh)
    )
    run.fit(3, callbacks=[change])
    return run


def compiled_in_training() -> Training:
    """By a callback: with another loss, metrics and optimizer, from the second epoch on."""
    run = Training()

    def compiled_again(epoch: int, logs: Any = None) -> None:
        if epoch:
            run.compile(["mae", contrastive][epoch - 1], run.model.optimizer if epoch == 1 else None, metrics=["mse"])
            run.model.make_train_function(force=True)

    run.fit(3, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=compiled_again)])
    return run


CASES: dict[str, Callable[[], Training]] = {
    case.__name__: case
    for case in (
        *(recompiled, another_loss, another_optimizer, layer_added, another_head, activation, activity),
        *(mode_between, mode_in_training, features_in_training, features_often, activation_in_training),
        compiled_in_training,
    )
}


def changed(kind: str | None, zero: int, name: str) -> Result:
    """A case's trainings, evaluated and predicted at the end; `kind`: None for one device."""
    fresh()
    with scope(None if kind is None else strategy(kind, RULES, zero=zero)):
        run = CASES[name]()
    return {
        "history": run.histories,
        "evaluate": run.model.evaluate(run.x, run.y, batch_size=BATCH, verbose=0),
        "predict": run.model.predict(run.x, batch_size=BATCH, verbose=0),
        **told(run.model),
    }


def shared(kind: str | None) -> Result:
    """Two models in turn that share the column layer of a pair."""
    fresh()
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(ROWS, size)).astype("float32") for size in (6, 4))
    rules: dict[str, tuple[str | None, ...]] = {".*a/kernel": (None, "model"), ".*[yz]/kernel": ("model", None)}
    histories = []
    with scope(None if kind is None else strategy(kind, rules)):
        inputs = layers.Input((6,))
        hidden = layers.Dense(WIDTH, name="a")(inputs)
        one, two = (keras.Model(inputs, layers.Dense(4, name=name)(hidden), name=f"of_{name}") for name in "zy")
        for model in (one, two):
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        for model in (one, two, one, two):
            histories.append(model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history)
    result = told(one)
    return {"history": histories, **result, "of two": told(two)["weights"]}


def taught(kind: str | None, zero: int, other: str) -> Result:
    """A student learns what a teacher gives that was trained under another strategy."""
    fresh()
    with scope(None if kind is None else strategy(other, RULES, zero=zero)):
        teacher = Training(layers.BatchNormalization(epsilon=0.1))
        teacher.fit()
        teacher.model.trainable = False
    with scope(None if kind is None else strategy(kind, {".*z/kernel": (None, "model")})):
        inputs = layers.Input((6,))
        student = keras.Sequential([layers.Input((6,)), layers.Dense(4, name="z")], name="student")
        model = keras.Model(inputs, student(inputs) - teacher.model(inputs), name="distance")
        model.compile("sgd", "mse")
        history = model.fit(teacher.x, 0 * teacher.y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    weights = {v.path: np.asarray(keras.ops.convert_to_numpy(v)) for v in student.variables}
    return {"history": history, "weights": weights, "predict": model.predict(teacher.x, batch_size=BATCH, verbose=0)}


def nested(kind: str, other: str, zero: int) -> str:
    """What is said where the part goes on being trained, or is stored in parts on the other mesh."""
    fresh()
    with scope(strategy(other, RULES, zero=zero)):
        part = Training()
        part.fit()
        part.model.trainable = not zero
    try:
        with scope(strategy(kind, RULES)):
            model = keras.Sequential([layers.Input((6,)), part.model, layers.Dense(4, name="head")])
            model.compile("sgd", "mse")
            model.fit(part.x, part.y, verbose=0)
    except unidist.LayoutError as error:
        return str(error)
    return ""

"""What the processes of test_zero run: training with states, gradients and values spread over the data ranks."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

import unidist
from tests.keras.jax.models import BATCH, CASES, ROWS, compile_case
from tests.keras.jax.programs import made
from tests.support.runs import Result, fresh, scope, strategy, told


def train(name: str, kind: str | None, zero: int, optimizer: str = "adam") -> Result:
    """Five batches, the last ragged, then evaluate and predict with batches of one size that does not divide."""
    fresh()
    data = CASES[name].data()
    with scope(_strategy(name, kind, zero)):
        model = made(name, optimizer)
        with unidist.ledger() as book:
            history = model.fit(**data, batch_size=BATCH, epochs=1, shuffle=True, verbose=0).history
        scored = {key: value for key, value in data.items() if key != "class_weight"}
        evaluated = model.evaluate(**scored, batch_size=ROWS // 2, verbose=0, return_dict=True)
        predicted = model.predict(data["x"], batch_size=ROWS // 2, verbose=0)
    sent = {op: book.bytes(op) for op in ("all_reduce", "reduce_scatter", "all_gather")}
    seen = {"history": history, "evaluate": evaluated, "predict": predicted, "sent": sent}
    return {**seen, **_measured(model, name, kind), **told(model)}


def _strategy(name: str, kind: str | None, zero: int) -> Any:
    return None if kind is None else strategy(kind, CASES[name].rules, zero=zero)


def _measured(model: Any, name: str, kind: str | None) -> Result:
    """Bytes on the first device, and what the rules alone would leave there."""
    rules = CASES[name].rules if kind not in (None, "dp") else {}
    described = unidist.describe(model)
    weights, slots = model.trainable_variables, [v for v in model.optimizer.variables if v.shape]
    ruled = [v.value.nbytes // (2 if any(re.fullmatch(rule, v.path) for rule in rules) else 1) for v in weights]
    others = model.metrics_variables + [v for v in model.non_trainable_variables if "seed" in v.path]
    return {
        "ruled": sum(ruled),
        "values": _held(weights),
        "states": _held(slots),
        "described slots": sum(row.is_sharded for row in described.rows if row.kind == "slots"),
        "slot count": len(slots),
        "others whole": all(v.value.is_fully_replicated for v in others),
    }


def _held(variables: Any) -> int:
    return sum(variable.value.addressable_shards[0].data.nbytes for variable in variables)


def moved(kinds: tuple[tuple[str | None, int], ...]) -> Result:
    """A trained model, its optimizer built, placed on one strategy after another and trained on each."""
    fresh()
    data = CASES["mlp"].data()
    model = made("mlp", "adam")
    losses, states = [], []
    for kind, zero in kinds:
        if kind is not None:
            unidist.parallelize(model, _strategy("mlp", kind, zero))
            states.append((_held(model.trainable_variables), _held(model.optimizer.variables[2:])))
        losses += model.fit(**data, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history["loss"]
    return {"history": losses, "held": states, **told(model)}


def resumed(first: tuple[str | None, int], second: tuple[str | None, int] | None, folder: str) -> Result:
    """Two epochs; with `second` the model is saved between them and loaded under another strategy."""
    fresh()
    data = CASES["conv"].data()
    with scope(_strategy("conv", *first)):
        model = made("conv", "adam")
        model.fit(**data, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        if second is not None:
            model.save(Path(folder) / "model.keras")
    if second is not None:
        with scope(_strategy("conv", *second)):
            model = keras.saving.load_model(Path(folder) / "model.keras")
    history = model.fit(**data, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    # Keras renames on loading.
    return {"history": history, **{**told(model), "weights": list(unidist.gather_weights(model).values())}}


class HandWritten(keras.Model):
    """A step of the user's own from Keras's stateless functions."""

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, other, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def objective(values: Any) -> Any:
            outputs, updated = self.stateless_call(values, other, x, training=True)
            errors = keras.ops.sum(keras.ops.square(outputs - keras.ops.one_hot(y, 4)), axis=-1)
            # Mixes the rows: no sum of the shards' own losses.
            return keras.ops.logsumexp(errors), updated

        (loss, other), gradients = jax.value_and_grad(objective, has_aux=True)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": loss}, (trainable, other, slots, metrics)


def by_hand(kind: str | None, zero: int, eagerly: bool) -> Result:
    fresh()
    case = CASES["conv"]
    data = {key: case.data()[key][: 2 * BATCH] for key in ("x", "y")}
    with scope(_strategy("conv", kind, zero)):
        model = case.build()
        model = HandWritten(model.inputs, model.outputs, name="conv")
        compile_case(model, case, "adam", run_eagerly=eagerly)
    history = model.fit(**data, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history
    return {"history": history, **_measured(model, "conv", kind), **told(model)}


def outside(zero: int) -> bool:
    """Whether outside of fit a call gives what predict gives, and what an optimizer updates rests where it did."""
    fresh()
    data = CASES["mlp"].data()
    with strategy("dp", zero=zero).scope():
        model = made("mlp", "adam")
        called = keras.ops.convert_to_numpy(model(data["x"]))
        optimizer, weights = model.optimizer, model.trainable_variables
        optimizer.build(weights)
        values = [weight.value for weight in weights]
        updated, _ = jax.jit(optimizer.stateless_apply)([v.value for v in optimizer.variables], values, values)
    rests = all(new.sharding.is_equivalent_to(old.sharding, new.ndim) for new, old in zip(updated, values, strict=True))
    return rests and bool(np.allclose(called, model.predict(data["x"], verbose=0), atol=1e-6))


@keras.saving.register_keras_serializable("tests")
class Centred(keras.layers.Layer):
    """A layer of the user's own with weights: alone it treats each row by itself, else it takes their mean away."""

    def __init__(self, alone: bool, **options: Any) -> None:
        super().__init__(**options)
        self.alone = alone

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return (x - keras.ops.mean(x, axis=-1 if self.alone else 0, keepdims=True)) * self.scale


def sent(kind: str | None, zero: int, alone: bool = True) -> Result:
    """Three batches that divide, of layers that all treat rows alone but one, if `alone` is false, and dropout."""
    fresh()
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(24, 6, 12)).astype("float32"), rng.normal(size=(24, 4)).astype("float32")
    with scope(strategy(kind, {".*column/kernel": (None, "model"), ".*column/bias": ("model",)}, zero=zero)):
        model = keras.Sequential(
            [
                keras.Input((6, 12)),
                keras.layers.Dense(32, "gelu", name="column"),
                Centred(alone, name="centred"),
                keras.layers.Dropout(0.2, seed=3, name="drop"),
                keras.layers.LSTM(8, name="lstm"),
                keras.layers.LayerNormalization(name="norm"),
                keras.layers.Dense(4, name="head"),
            ],
            name="model",
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss="mse")
        with unidist.ledger() as book:
            history = model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
        again = _gathers(model, x[:8]) if kind is not None else 0
    ops = sorted({event.op for event in book.events})
    weights = model.trainable_variables
    return {
        "history": history,
        "sent": {op: (book.count(op), book.bytes(op)) for op in ops},
        "weights' bytes": [int(np.prod(v.shape)) * 4 for v in weights],
        "gathers asked for": again,
        **told(model),
    }


def _gathers(model: Any, x: Any) -> int:
    """How many all_gathers a gradient asks the compiler for."""

    def loss(values: Any) -> Any:
        outputs, _ = model.stateless_call(values, [v.value for v in model.non_trainable_variables], x, training=True)
        return keras.ops.mean(keras.ops.square(outputs))

    program = jax.jit(jax.grad(loss)).lower([v.value for v in model.trainable_variables])
    return int(program.as_text().count("stablehlo.all_gather"))


def sparse_step(zero: int | None) -> tuple[Any, bool]:
    """(a variable behind two steps down a sparse gradient, whether it is stored in parts)."""
    from jax.experimental.sparse import BCOO

    keras.utils.clear_session()
    with contextlib.nullcontext() if zero is None else unidist.DataParallel(zero=zero).scope():
        variable = keras.Variable(np.arange(32.0, dtype="float32").reshape(8, 4))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([variable])
        gradient = BCOO.fromdense(np.eye(8, 4, dtype="float32"))
        states, values = [v.value for v in optimizer.variables], [variable.value]
        for _ in range(2):
            values, states = optimizer.stateless_apply(states, [gradient], values)
    return np.asarray(values[0]), not variable.value.sharding.is_fully_replicated

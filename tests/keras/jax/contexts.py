"""What the processes of test_contexts run: models whose sequences the compiler cuts over an axis of contexts."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import jax
import keras
import numpy as np
from keras import layers, ops

import unidist
from tests.support.runs import Result, fresh, scope, told
from unidist.keras.jax.compiled import Program
from unidist.keras.patching.compat import set_keras_mask

LENGTH, WIDTH, HEADS, WORDS = 128, 16, 2, 20


def network(length: int = LENGTH) -> Any:
    given = keras.Input((length,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(given)
    near = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1, seed=3)(near, near, use_causal_mask=True)
    x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x)))
    return keras.Model(given, layers.Dense(WORDS)(x))


def chosen(sizes: dict[str, int] | None, zero: int = 0) -> Any:
    if sizes is None:
        return None
    # Without rules: a mesh of models alone holds all of each sequence on each device.
    mesh = unidist.Mesh(sizes)
    return unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, {}), zero=zero)


def measured(sizes: dict[str, int], zero: int, rows: int) -> Result:
    """Bytes that a step of so many rows holds for a while on a device, its part of the tokens, and what it sends."""
    fresh()
    seen: Result = {}

    def record(program: Any, what: str, distribution: Any, state: Any, batch: Any) -> None:
        seen["temporary"] = program._function.lower(state, batch).compile().memory_analysis().temp_size_in_bytes
        seen["tokens"] = jax.tree.leaves(batch)[0].addressable_shards[0].data.shape
        recorded(program, what, distribution, state, batch)

    recorded = Program.record
    tokens = np.random.default_rng(2).integers(0, WORDS, (rows, LENGTH + 1))
    with scope(chosen(sizes, zero)), mock.patch.object(Program, "record", record), unidist.ledger() as book:
        model = network()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=rows, verbose=0)
    sent = Counter[tuple[str, tuple[str, ...]]]()
    for event in book.events:
        sent[event.op, event.axes] += int(event.bytes)
    return {**seen, "sent": sent, "weights": 4 * model.count_params()}


def planned(sizes: dict[str, int]) -> Result:
    """What a plan says of the step that is measured."""
    fresh()
    mesh = unidist.Mesh(sizes)
    plan = unidist.plan(network(), mesh, unidist.LayoutMap(mesh, {}), batch=4)
    sent = Counter[tuple[str, tuple[str, ...]]]()
    for event in plan.predicted.events:
        sent[event.op, event.axes] += int(event.bytes)
    return {"sent": sent, "activations": plan.activation_bytes_per_device, "estimated": plan.estimated}


class Marked(keras.Model):
    """Hands itself sequences that carry a mask, in a step of the user's own."""

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, other, slots, metrics = state
        tokens, y = data

        def objective(values: Any) -> Any:
            x = ops.one_hot(tokens, WIDTH)
            set_keras_mask(x, tokens != 0)
            outputs, updated = self.stateless_call(values, other, x, training=True)
            return ops.mean(ops.square(outputs - y)), updated

        (loss, other), gradients = jax.value_and_grad(objective, has_aux=True)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": loss}, (trainable, other, slots, metrics)


def masked(sizes: dict[str, int] | None, eagerly: bool) -> Result:
    """Sequences of features whose masked places are left out of a mean."""
    fresh()
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 4, (6, 8))
    with scope(chosen(sizes)):
        given = keras.Input((8, WIDTH))
        pooled = layers.GlobalAveragePooling1D()(layers.Dense(WIDTH, "tanh")(given))
        model = Marked(given, layers.Dense(3)(pooled))
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=eagerly)
        history = model.fit(tokens, rng.normal(size=(6, 3)).astype("float32"), batch_size=2, verbose=0).history
    return {"history": history, **told(model)}


def beside(sizes: dict[str, int] | None) -> Result:
    """A sequence beside what is none: features, one number a row, and labels that do not divide."""
    fresh()
    rng = np.random.default_rng(6)
    given = {"text": rng.integers(0, WORDS, (6, 8)), "of": rng.normal(size=(6, 5)), "kind": rng.integers(0, 3, (6, 1))}
    with scope(chosen(sizes)):
        inputs = {"text": keras.Input((8,), dtype="int32", name="text"), "of": keras.Input((5,), name="of")}
        inputs["kind"] = keras.Input((1,), dtype="int32", name="kind")
        text = layers.Conv1D(WIDTH, 3, padding="same")(layers.Embedding(WORDS, WIDTH)(inputs["text"]))
        joined = layers.concatenate([layers.Flatten()(text), inputs["of"], ops.cast(inputs["kind"], "float32")])
        model = keras.Model(inputs, layers.Dense(3, "sigmoid")(joined))
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
        y = rng.integers(0, 2, (6, 3))
        history = model.fit(given, y, batch_size=4, shuffle=False, verbose=0).history
        predicted = model.predict(given, verbose=0)
    return {"history": history, "predicted": predicted, **told(model)}


class _Pooled(layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return ops.max_pool(x, 3, 1, padding="same") + ops.average_pool(x, 3, 1, padding="same")


class _Padded(layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        ends = ((0, 0), (1, 1), (0, 0))
        return ops.pad(x, ends)[:, 2:] + ops.pad(x, ends, constant_values=1.0)[:, 2:]


def windowed(case: str, sizes: dict[str, int] | None) -> Result:
    """Windows over places that overlap: a maximum beside a mean, two pads, or a kernel that an axis "model" cuts."""
    fresh()
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(22, 8, 6)).astype("float32"), rng.normal(size=(22, 1)).astype("float32")
    mesh = None if sizes is None else unidist.Mesh(sizes)
    rules = {".*conv.*/kernel": (None, None, "model")} if case == "convolved" else {}
    with scope(None if mesh is None else unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules))):
        convolved = layers.Conv1D(8, 3, padding="same", activation="tanh", name="conv")
        chain = {
            "pooled": [layers.Dense(WIDTH, "tanh"), _Pooled()],
            "padded": [layers.Dense(WIDTH, "tanh"), _Padded()],
            "convolved": [convolved, layers.Conv1D(8, 3, strides=2, padding="same", name="conv_again")],
        }
        model = keras.Sequential([keras.Input((8, 6)), *chain[case], layers.Flatten(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        predicted = model.predict(x, batch_size=8, verbose=0)
    return {"history": history, "predicted": predicted, **told(model)}


def by_hand(sizes: dict[str, int] | None) -> Result:
    """A loop of the user's own, with Keras's stateless functions in a program of theirs."""
    fresh()
    tokens = np.random.default_rng(8).integers(0, WORDS, (4, 8))
    with scope(chosen(sizes)):
        model = network(8)

        @jax.jit
        def loss_of(values: Any, x: Any) -> Any:
            outputs, _ = model.stateless_call(values, [v.value for v in model.non_trainable_variables], x)
            return ops.mean(ops.square(outputs))

        values = [v.value for v in model.trainable_variables]
        loss, gradients = jax.value_and_grad(loss_of)(values, tokens)
        program = loss_of.lower(values, tokens).compile().as_text()
    found = {v.path: np.asarray(g) for v, g in zip(model.trainable_variables, gradients, strict=True)}
    return {"outputs": loss, "weights": found, "gathers": "all-gather" in program}


def written(sizes: dict[str, int] | None) -> Any:
    """What keras_hub's GPT-2 writes behind two beginnings, after a step of training."""
    import keras_hub

    fresh()
    rng = np.random.default_rng(9)
    tokens = rng.integers(1, WORDS, (4, 8))
    given = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    with scope(chosen(sizes)):
        sizes_of_it = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
        backbone = keras_hub.models.GPT2Backbone(WORDS, **sizes_of_it, max_sequence_length=8, dropout=0.0)
        model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
        model.compile(
            keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True), sampler="greedy"
        )
        model.train_on_batch(given, np.roll(tokens, -1, 1))
        begun = {"token_ids": tokens[:2], "padding_mask": np.arange(8)[None] < np.asarray([[3], [5]])}
        return np.asarray(model.generate(begun, stop_token_ids=None)["token_ids"])

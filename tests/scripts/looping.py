"""A training loop of one's own, as Keras's guides write it for torch and for JAX."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

ROWS, BATCH, WIDTH, KINDS = 16, 8, 6, 3


def run(steps: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(9)
    x, y = rng.normal(size=(ROWS, WIDTH)).astype("float32"), rng.integers(0, KINDS, ROWS).astype("int32")
    inputs = keras.Input((WIDTH,))
    hidden = layers.Dense(16, "relu", name="up")(inputs)
    hidden = layers.Dense(8, "relu", name="down", kernel_regularizer=keras.regularizers.L2(0.01))(hidden)
    model = keras.Model(inputs, layers.Dense(KINDS, name="kind")(hidden), name="looped")
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    seen = keras.metrics.SparseCategoricalAccuracy()
    batches = [(x[k : k + BATCH], y[k : k + BATCH]) for k in range(0, ROWS, BATCH)] * steps
    loop = _on_torch if keras.backend.backend() == "torch" else _on_jax
    losses = loop(model, optimizer, loss, seen, batches)
    return {
        "losses": losses,
        "accuracy": float(seen.result()),
        "predict": model.predict(x, verbose=0),
        "weights": model.get_weights(),
    }


def _on_torch(model: Any, optimizer: Any, loss: Any, seen: Any, batches: Any) -> list[float]:
    import torch

    losses = []
    for x, y in batches:
        logits = model(torch.as_tensor(x), training=True)
        value = loss(torch.as_tensor(y), logits) + sum(model.losses)
        model.zero_grad()
        value.backward()
        weights = list(model.trainable_weights)
        with torch.no_grad():
            optimizer.apply([w.value.grad for w in weights], weights)
        seen.update_state(y, logits.detach())
        losses.append(float(value.detach()))
    return losses


def _on_jax(model: Any, optimizer: Any, loss: Any, seen: Any, batches: Any) -> list[float]:
    import jax

    optimizer.build(model.trainable_variables)

    def losing(trainable: Any, other: Any, x: Any, y: Any) -> Any:
        logits, other, added = model.stateless_call(trainable, other, x, training=True, return_losses=True)
        return loss(y, logits) + sum(added), (logits, other)

    @jax.jit
    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, other, slots, counts = state
        (value, (logits, other)), gradients = jax.value_and_grad(losing, has_aux=True)(trainable, other, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return value, (trainable, other, slots, seen.stateless_update_state(counts, y, logits))

    parts = [model.trainable_variables, model.non_trainable_variables, optimizer.variables, seen.variables]
    state = tuple([v.value for v in part] for part in parts)
    losses = []
    for x, y in batches:
        value, state = step(state, x, y)
        losses.append(float(value))
    for part, values in zip(parts, state, strict=True):
        for variable, value in zip(part, values, strict=True):
            variable.assign(value)
    return losses

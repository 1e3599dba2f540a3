"""A loop of the user's own on torch, with this process's rows or with all of them."""

from __future__ import annotations

import keras
import numpy as np

import unidist
from tests.keras.contract import plain, rows
from tests.support.runs import Result, fresh, scope, strategy
from unidist.keras import sessions


def looped(kind: str | None, before: str, own: bool, zero: int = 0, zeroes: bool = True) -> Result:
    """Three steps; `before`: what was called before them; `own`: each process has its own half of each batch; `zeroes`:
    gradients are forgotten by `zero_grad`, those of a step that is not taken too; else by hand."""
    import torch

    fresh()
    x, y = rows(12)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given = None if kind is None else strategy(kind, zero=zero)
    with scope(given) if before != "parallelize" else scope(None):
        model = plain()
    if before == "parallelize" and kind is not None:
        unidist.parallelize(model, unidist.DataParallel())
    if before == "predict":
        model.predict(x, verbose=0)
    if before == "fit":
        model.compile("sgd", loss)
        model.fit(x[:4], y[:4], verbose=0, batch_size=4)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    part = slice(None)
    if own and kind is not None:
        half = 2 * unidist.process_index()
        part = slice(half, half + 2)
    losses: list[float] = []
    for start in range(0, 12, 4):
        batch = x[start : start + 4][part], y[start : start + 4][part]
        if zeroes:
            if zero:
                loss(torch.as_tensor(batch[1]), model(torch.as_tensor(batch[0]), training=True)).backward()
            model.zero_grad()
        else:
            for v in model.trainable_variables:
                v.value.grad = None
        value = loss(torch.as_tensor(batch[1]), model(torch.as_tensor(batch[0]), training=True))
        value.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        losses.append(float(value.detach()))
    weights = unidist.gather_weights(model) if kind is not None else {v.path: np.array(v) for v in model.weights}
    return {"weights": weights, "losses": losses}


def two_heads(kind: str | None) -> Result:
    """Two models that share an encoder, which is called by itself before; both are in one loss, then one is fitted."""
    import torch

    fresh()
    x, y = rows(8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with scope(strategy(kind)):
        encoder = keras.Sequential([keras.Input((x.shape[1],)), keras.layers.Dense(6, "tanh", name="code")])
        encoder(torch.as_tensor(x[:2]))
        one, two = (keras.Sequential([encoder.inputs[0], *encoder.layers, keras.layers.Dense(4)]) for _ in range(2))
        weights = [*one.trainable_variables, *two.layers[-1].trainable_variables]
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(weights)
        for start in (0, 4):
            part = slice(start, start + 4)
            value = sum(loss(torch.as_tensor(y[part]), model(torch.as_tensor(x[part]))) for model in (one, two))
            for v in weights:
                v.value.grad = None
            value.backward()
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in weights], weights)
        two.compile(keras.optimizers.SGD(0.1), loss)
        history = two.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    return {"weights": {str(k): np.array(v) for k, v in enumerate([*weights, *two.weights])}, "history": history}


def is_prepared_within_a_graph() -> bool:
    """Whether a model that becomes a part of a graph is got ready for a loop of its own."""
    fresh()
    with scope(strategy("dp")):
        inputs = keras.Input((4,))
        inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        keras.Model(inputs, inner(inputs))
    return sessions.of(inner).engine is not None

"""A loop of the user's own on torch, with this process's rows or with all of them."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

import unidist
from tests.support.nets import RULES, plain, rows
from tests.support.runs import Result, fresh, scope, strategy
from unidist.keras.records import model_record


def looped(
    kind: str | None,
    before: str,
    own: bool,
    zero: int = 0,
    zeroes: str = "zero_grad",
    derived: bool = False,
    scaled: bool = False,
) -> Result:
    """Three steps; `before`: what was called before them; `own`: each process has its own half of each batch; `zeroes`:
    gradients are forgotten by `zero_grad`, those of a step that is not taken too, or by hand, on the `variables` or the
    `parameters`; `derived`: those of every second step are torch.autograd.grad's; `scaled`: losses are scaled, and the
    second step's gradients are not finite."""
    import torch

    fresh()
    x, y = rows(12)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given = None if kind is None else strategy(kind, RULES, zero=zero)
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
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
    optimizer.build(model.trainable_variables)
    part = slice(None)
    if own and kind is not None:
        half = 2 * unidist.process_index()
        part = slice(half, half + 2)
    losses: list[float] = []
    for start in range(0, 12, 4):
        batch = x[start : start + 4][part], y[start : start + 4][part]
        if zeroes == "zero_grad":
            if zero:
                loss(torch.as_tensor(batch[1]), model(torch.as_tensor(batch[0]), training=True)).backward()
            model.zero_grad()
        else:
            held = model.parameters() if zeroes == "parameters" else [v.value for v in model.trainable_variables]
            for one in held:
                one.grad = None
        value = loss(torch.as_tensor(batch[1]), model(torch.as_tensor(batch[0]), training=True))
        target = optimizer.scale_loss(value) * (float("inf") if start == 4 else 1.0) if scaled else value
        if derived and start != 4:
            gradients = list(torch.autograd.grad(target, [v.value for v in model.trainable_variables]))
        else:
            target.backward()
            gradients = [v.value.grad for v in model.trainable_variables]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(value.detach()))
    return {"weights": _weights(model, kind), "losses": losses}


def stateless(kind: str | None, zero: int) -> Result:
    """Two steps on values and gradients that the optimizer is given; what it gives back."""
    import torch

    fresh()
    with scope(None if kind is None else strategy(kind, RULES, zero=zero)):
        model = plain()
        optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
        optimizer.build(model.trainable_variables)
    values, states = ([v.value.detach().clone() for v in one.variables] for one in (model, optimizer))
    gradients = [torch.sin(torch.arange(float(x.numel()))).reshape(x.shape) for x in values]
    with torch.no_grad():
        for _ in range(2):
            values, states = optimizer.stateless_apply(states, gradients, values)
    return {"weights": {v.path: np.array(new) for v, new in zip(model.variables, values, strict=True)}}


def _weights(model: keras.Model, kind: str | None) -> dict[str, np.ndarray]:
    return unidist.gather_weights(model) if kind is not None else {v.path: np.array(v) for v in model.weights}


def _clip_by_hand(model: keras.Model, scale: float, by: str) -> None:
    for v in model.trainable_variables:
        if by == "norm":
            v.value.grad.mul_(scale)
        elif by == "views":
            v.value.grad.reshape(-1)[::2].mul_(scale)
        else:
            v.value.grad = v.value.grad.flip(0) * scale


def clipped(kind: str | None, zero: int, by: str) -> Result:
    """Three steps, whose gradients torch clips, of a model's `parameters`, or of the values of its `variables`; or the
    loop itself: by their norm (`norm`), in views of them (`views`), or it puts others in their place (`set`), those
    of torch.autograd.grad too (`derived`); or an optimizer of the user's own does (`own apply`, `own gradients`)."""
    import torch

    from tests.support.optimizers import OPTIMIZERS

    fresh()
    x, y = rows(12)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with scope(None if kind is None else strategy(kind, RULES, zero=zero)):
        model = plain()
    optimizer = OPTIMIZERS[by]() if by.startswith("own") else keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer)
    optimizer.build(model.trainable_variables)
    norms: list[float] = []
    for start in range(0, 12, 4):
        part = slice(start, start + 4)
        model.zero_grad()
        loss(torch.as_tensor(y[part]), model(torch.as_tensor(x[part]), training=True)).backward()
        values = [v.value for v in model.trainable_variables]
        if by == "derived":
            value = loss(torch.as_tensor(y[part]), model(torch.as_tensor(x[part]), training=True))
            for v, more in zip(model.trainable_variables, torch.autograd.grad(value, values), strict=True):
                v.value.grad = v.value.grad - 0.5 * more
        if by in ("parameters", "variables"):
            given = model.parameters() if by == "parameters" else values
            norms.append(float(torch.nn.utils.clip_grad_norm_(given, 0.1)))
        else:
            norms.append(float(sum(torch.sum(v.grad**2) for v in values)) ** 0.5)
            if not by.startswith("own"):
                _clip_by_hand(model, 0.1 / norms[-1], by)
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
    return {"weights": _weights(model, kind), "norms": norms}


def thawed(kind: str | None, zero: int, by: str) -> Result:
    """A loop on each process's own rows, before and behind some layers are trained that were frozen: `by` Keras's
    `layers`, or by torch's `parameters`. A fit before it trains the others alone."""
    import torch

    fresh()
    x, y = rows(12)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    count = 1 if kind is None else unidist.process_count()
    own = slice(None) if kind is None else slice(unidist.process_index(), None, count)

    def freeze(layer: keras.Layer, frozen: bool) -> None:
        layer.trainable = not frozen or by == "parameters"
        for one in layer.parameters() if by == "parameters" else ():
            one.requires_grad_(not frozen)

    with scope(None if kind is None else strategy(kind, RULES, zero=zero)):
        model = plain()
        frozen = [layer for layer in model.layers if layer.weights][:-1]
        for layer in frozen:
            freeze(layer, True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        if by == "layers":
            model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    for step in range(4):
        if step in (1, 2):
            freeze(frozen[2 - step], False)
        model.zero_grad()
        loss(torch.as_tensor(y[own]), model(torch.as_tensor(x[own]), training=True)).backward()
        trained = [v for v in model.trainable_variables if v.value.grad is not None]
        optimizer = keras.optimizers.SGD(0.1)
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in trained], trained)
    return {"weights": _weights(model, kind)}


def frozen_and_moved() -> tuple[bool, bool]:
    """Whether a kernel is cut behind a fit that finds layouts, and whether it was trained, which torch had frozen."""
    fresh()
    x, y = rows(12)
    with unidist.ModelParallel().scope():
        model = plain()
        layer = next(layer for layer in model.layers if layer.weights)
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        before = layer.get_weights()[0]
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Gradients do not exist")
            model.fit(x, y, shuffle=False, verbose=0)
    return layer.weights[0]._storage.is_sharded, bool(np.any(layer.get_weights()[0] != before))


def outside(kind: str | None, zero: int, by: str, own: bool = False) -> Result:
    """Before and behind two fits: a loop in which torch's optimizer, Keras's or the loop itself (`data`) writes the
    weights, and gradients of inputs and weights. `own`: as a DistributedSampler deals the rows out."""
    import torch

    fresh()
    x, y = rows(12)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with scope(None if kind is None else strategy(kind, RULES, zero=zero)):
        model = plain()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    outputs: list[Any] = []
    share = slice(unidist.process_index(), None, unidist.process_count()) if own else slice(None)
    for _ in range(2):
        weights = list(model.trainable_variables)
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if by == "torch" else keras.optimizers.SGD(0.1)
        for start in range(0, 12, 4):
            model.zero_grad()
            part = torch.as_tensor(x[start : start + 4][share]), torch.as_tensor(y[start : start + 4][share])
            loss(part[1], model(part[0], training=True)).backward()
            with torch.no_grad():
                if by == "torch":
                    optimizer.step()
                elif by == "keras":
                    optimizer.apply([v.value.grad for v in weights], weights)
                for one in model.parameters() if by == "data" else ():
                    one.data -= 0.1 * one.grad
        outputs.append(model.predict(x, verbose=0))
        outputs.append(model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"])
        outputs.append([v.value.grad.numpy().copy() for v in weights] if by == "torch" else [])
        given = torch.tensor(x[:3], requires_grad=True)
        model(given).sum().backward()
        outputs.append(given.grad.numpy())
        found = torch.autograd.grad(model(torch.as_tensor(x[:3])).square().sum(), [v.value for v in weights])
        outputs.append([one.numpy() for one in found])
    sharded = kind is not None and any(row.is_sharded for row in unidist.describe(model).rows)
    return {"weights": _weights(model, kind), "outputs": outputs, "sharded": sharded}


def penalized() -> str:
    """What is raised where a loop asks for gradients that it can differentiate."""
    import torch

    fresh()
    x, _ = rows(4)
    with scope(strategy("dp")):
        model = plain()
    value = model(torch.as_tensor(x)).mean()
    try:
        torch.autograd.grad(value, [v.value for v in model.trainable_variables], create_graph=True)
    except unidist.CapabilityError as error:
        return str(error)
    return ""


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
    return model_record.of(inner).engine is not None

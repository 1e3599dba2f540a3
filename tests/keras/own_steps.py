"""Steps of the user's own on torch that look at gradients and values, or write into them; and what the processes of
their tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch
from keras import layers, ops
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters

import unidist
from tests.support.runs import Result, fresh, scope, strategy, told
from unidist.keras.torch import context

RULES: dict[str, tuple[str | None, ...]] = {".*/a/kernel": (None, "model"), ".*/b/kernel": ("model", None)}
Weights = list[Any]


class Stepping(keras.Model):
    """Begins, makes gradients, and ends the step in ways that a case says."""

    def __init__(self, case: str) -> None:
        super().__init__(name="own")
        self.a, self.b = layers.Dense(8, activation="tanh", name="a"), layers.Dense(3, name="b")
        self._case = CASES[case]

    def call(self, x: Any, training: bool = False) -> Any:
        return self.b(self.a(x))

    def loss_of(self, data: Any) -> Any:
        x, y = data
        return self.compute_loss(x=x, y=y, y_pred=self(x, training=True))

    def train_step(self, data: Any) -> dict[str, Any]:
        weights = list(self.trainable_weights)
        self._case.get("begin", lambda model, weights: model.zero_grad())(self, weights)
        loss = self.loss_of(data)
        gradients = self._case.get("gradients", by_backward)(self, weights, loss)
        with torch.no_grad():
            self._case.get("end", applied)(self, weights, gradients)
            logs = self._case.get("logs", lambda model, weights: {})(self, weights)
        if "then" in self._case:
            self._case["then"](self, weights, data)
        return {"loss": loss.detach(), **logs}


def by_backward(model: Any, weights: Weights, loss: Any) -> Any:
    loss.backward()
    return [v.value.grad for v in weights]


def applied(model: Any, weights: Weights, gradients: Any) -> None:
    model.optimizer.apply(gradients, weights)


def changing(change: Callable[[Any], Any]) -> dict[str, Any]:
    """A step that changes each gradient."""
    return {"end": lambda model, weights, gradients: applied(model, weights, [change(g) for g in gradients])}


def ending(act: Callable[[Weights], Any]) -> dict[str, Any]:
    """A step that acts on all variables, and applies their gradients then."""

    def end(model: Any, weights: Weights, gradients: Any) -> None:
        found = act(weights)
        applied(model, weights, found if isinstance(found, list) else [v.value.grad for v in weights])

    return {"end": end}


def updating(update: Callable[[Any], Any]) -> dict[str, Any]:
    """A step that updates each variable by itself."""
    return {"end": lambda model, weights, gradients: [update(v) for v in weights] and None}


def with_grad(value: Any, function: str, *args: Any) -> None:
    getattr(value.grad, function)(*args)


def to_unit(v: Any) -> None:
    v.value.grad /= v.value.grad.norm() + 1e-6


def sparse(v: Any) -> None:
    grad = v.value.grad
    grad[grad.abs() < grad.abs().mean()] = 0


def views(v: Any) -> None:
    v.value.grad.view(-1)[:3].mul_(0.0)
    v.value.grad[0].clamp_(-0.01, 0.01)


def by_all(weights: Weights) -> list[Any]:
    norm = torch.sqrt(sum((v.value.grad * v.value.grad).sum() for v in weights))
    return [v.value.grad * torch.clamp(0.05 / norm, max=1.0) for v in weights]


def foreach(weights: Weights) -> list[Any]:
    gradients = [v.value.grad for v in weights]
    norm = torch.stack(list(torch._foreach_norm(gradients))).norm()
    torch._foreach_mul_(gradients, 0.5)
    return list(torch._foreach_mul(gradients, 0.05 / float(norm)))


def finite(weights: Weights) -> list[Any]:
    gradients = [v.value.grad for v in weights]
    is_fine = all(bool(torch.isfinite(g).all()) and float(g.abs().max()) < 1e9 for g in gradients)
    return gradients if is_fine else [torch.zeros_like(g) for g in gradients]


def one_vector(weights: Weights) -> list[Any]:
    vector = parameters_to_vector([v.value.grad for v in weights])
    parts = torch.split(vector / vector.norm(), [v.value.numel() for v in weights])
    return [part.view(v.value.shape) for part, v in zip(parts, weights, strict=True)]


def rescale(model: Any, weights: Weights, gradients: Any) -> None:
    applied(model, weights, gradients)
    vector = parameters_to_vector([v.value for v in weights])
    vector_to_parameters(vector / vector.norm(), [v.value for v in weights])
    weights[0].value.view(-1)[1:3].mul_(0.5)


def sharpness(model: Any, weights: Weights, data: Any) -> None:
    """P. Foret, A. Kleiner, H. Mobahi and B. Neyshabur, "Sharpness-Aware Minimization" (2021): up the slope, and down
    from where one was with the gradient from there."""
    norm = torch.sqrt(sum((v.value.grad**2).sum() for v in weights))
    steps = [0.05 * v.value.grad / norm for v in weights]
    for v, step in zip(weights, steps, strict=True):
        v.assign_add(step)
    model.zero_grad()
    model.loss_of(data).backward()
    with torch.no_grad():
        for v, step in zip(weights, steps, strict=True):
            v.assign_sub(step)
        applied(model, weights, [v.value.grad for v in weights])


def sharpness_in_place(model: Any, weights: Weights, data: Any) -> None:
    """The same, written into the values: what was fetched before is of others."""
    with torch.no_grad():
        steps = [0.05 * v.value.grad for v in weights]
        for v, step in zip(weights, steps, strict=True):
            v.value.add_(step)
            v.value.abs()  # read behind the write
    model.zero_grad()
    model.loss_of(data).backward()
    with torch.no_grad():
        for v, step in zip(weights, steps, strict=True):
            v.value.view(-1).sub_(step.view(-1))
        applied(model, weights, [v.value.grad for v in weights])


def before_last(model: Any, weights: Weights, gradients: Any) -> None:
    """Of this step and the one before; each rank has its own."""
    frame = context.frame()
    known = model.__dict__.setdefault("_before", {})
    place = frame.rank if frame is not None else 0
    before, known[place] = known.get(place, gradients), gradients
    applied(model, weights, [0.5 * g + 0.5 * b for g, b in zip(gradients, before, strict=True)])


def forget(model: Any, weights: Weights) -> None:
    for v in weights:
        v.value.grad = None


def fill_with_zeros(model: Any, weights: Weights) -> None:
    for v in weights:
        if v.value.grad is not None:
            v.value.grad.zero_()


def forget_parameters(model: Any, weights: Weights) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def logged(model: Any, weights: Weights) -> dict[str, Any]:
    return {
        "weights": torch.sqrt(sum((v.value**2).sum() for v in weights)),
        "gradients": torch.stack([v.value.grad.norm(1) for v in weights]).sum(),
        "largest": max(p.grad.abs().max() for p in model.parameters()),
        "kernel": ops.sum(ops.square(weights[0])),
    }


def asked(model: Any, weights: Weights, loss: Any) -> Any:
    return list(torch.autograd.grad(loss, [v.value for v in weights]))


def counted(model: Any, weights: Weights, loss: Any) -> Any:
    """A metric takes its number between backward and the optimizer."""
    gradients = by_backward(model, weights, loss)
    model.metrics[0].update_state(loss.detach())
    return gradients


def every_third(model: Any, weights: Weights, gradients: Any) -> None:
    """Gradients add up over three steps, which the model counts by itself."""
    model.steps = getattr(model, "steps", 0) + 1
    if model.steps % 3 == 0:
        model.optimizer.apply(gradients, weights)
        model.zero_grad()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm of all": ending(by_all),
    "norm of each": changing(lambda g: g / (torch.linalg.vector_norm(g) + 1e-6)),
    "Keras's norm": changing(lambda g: g / (ops.norm(g) + 1e-6) + ops.mean(g)),
    "without mean": changing(lambda g: g - g.mean(dim=0, keepdim=True)),
    "largest": changing(lambda g: torch.where(g.abs() >= g.abs().quantile(0.5), g, torch.zeros_like(g))),
    "turned": changing(lambda g: g.reshape(-1).flip(0).reshape(g.shape)),
    "product": changing(lambda g: (g.T @ g @ g.T).T if g.ndim == 2 else g),
    "NumPy": changing(lambda g: torch.tensor(np.sign(g.numpy()) * np.abs(g.cpu().numpy()).max())),
    "precise": changing(lambda g: g.to(torch.float64).float() * 2),
    "clamped in place": ending(lambda weights: [with_grad(v.value, "clamp_", -0.02, 0.02) for v in weights] and None),
    "to unit in place": ending(lambda weights: [to_unit(v) for v in weights] and None),
    "data": ending(lambda weights: [v.value.grad.data.mul_(0.1 / v.value.grad.data.norm(2)) for v in weights] and None),
    "by mask": ending(lambda weights: [sparse(v) for v in weights] and None),
    "views": ending(lambda weights: [views(v) for v in weights] and None),
    "set": ending(lambda weights: [setattr(v.value, "grad", v.value.grad / 2) for v in weights] and None),
    "foreach": ending(foreach),
    "finite": ending(finite),
    "one vector": ending(one_vector),
    "torch's norm": ending(lambda weights: clip_grad_norm_([v.value for v in weights], 0.05) and None),
    "torch's value": ending(lambda weights: clip_grad_value_([v.value for v in weights], 0.01)),
    "decay": ending(lambda weights: [v.value.grad + 0.1 * v.value for v in weights]),
    "assigned": updating(lambda v: v.assign(v - 0.1 * v.value.grad)),
    "subtracted": updating(lambda v: v.assign_sub(0.1 * v.value.grad)),
    "in place": updating(lambda v: v.value.sub_(0.1 * v.value.grad)),
    "its data": updating(lambda v: v.value.data.add_(v.value.grad, alpha=-0.1)),
    "data set": updating(lambda v: setattr(v.value, "data", v.value.data - 0.1 * v.value.grad)),
    "rescaled": {"end": rescale},
    "sharpness": {"end": lambda model, weights, gradients: None, "then": sharpness},
    "sharpness in place": {"end": lambda model, weights, gradients: None, "then": sharpness_in_place},
    "of two steps": {"end": before_last},
    "every third": {"begin": lambda model, weights: None, "end": every_third},
    "forgotten": {"begin": forget},
    "zeros": {"begin": fill_with_zeros},
    "parameters": {"begin": forget_parameters},
    "logged": {"logs": logged},
    "asked": {"gradients": asked},
    "counted": {"gradients": counted, "logs": lambda model, weights: {"mean": model.metrics[0].result()}},
}


class Measuring(keras.Model):
    """With Keras's step. A metric looks at values behind the optimizer."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.a, self.b = layers.Dense(8, activation="tanh", name="a"), layers.Dense(3, name="b")
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.b(self.a(x))

    def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
        self.size.update_state(sum(ops.sum(ops.square(v)) for v in self.trainable_weights))
        return super().compute_metrics(*args, **kwargs)


class Inheriting(Stepping):
    """Keras's step, and a look at what it has left."""

    def train_step(self, data: Any) -> dict[str, Any]:
        found: dict[str, Any] = keras.Model.train_step(self, data)
        with torch.no_grad():
            return {**found, **logged(self, list(self.trainable_weights))}


def stepped(kind: str | None, zero: int, case: str) -> Result:
    """Two epochs of two batches, the last one uneven."""
    fresh()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(13, 6)).astype("float32"), rng.normal(size=(13, 3)).astype("float32")
    options = {} if kind is None else {"zero": zero}
    with scope(strategy(kind, RULES, **options)), unidist.ledger() as sent:
        model = Measuring() if case == "measuring" else Inheriting("plain") if case == "inheriting" else Stepping(case)
        model(x[:2])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        found = told(model)
    return {**found, "history": history, "_bytes": sent.bytes() if kind else 0}


def all_cases(kind: str | None, zero: int, cases: list[str]) -> dict[str, Result]:
    return {case: stepped(kind, zero, case) for case in cases}

"""What the user's own code writes: closures, globals, other objects, iterators, weights amid a call. In the simulator
it comes to one device's values, and what a step leaves of its batch is whole."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist
from tests.support.comparing import close
from tests.support.sampling import unless_all
from unidist.keras.torch import outside

_draws = np.random.default_rng(0)
X, Y = (_draws.normal(size=(22, n)).astype("float32") for n in (6, 3))
STRATEGIES: dict[str, Callable[[], Any]] = {
    "dp": unidist.DataParallel,
    "zero 3": lambda: unidist.DataParallel(zero=3),
    "found": unidist.ModelParallel,
    "2x2": lambda: unidist.ModelParallel(mesh=unidist.Mesh({"data": 2, "model": 2})),
}
LOSSES: list[Any] = []
STEPS = 0


class Model(keras.Sequential):
    """Its step calls a function with itself and the batch, which gives the loss."""

    def train_step(self, data: Any) -> dict[str, Any]:
        loss = self.compute(self, *data)
        if loss is not None:
            self.zero_grad()
            loss.backward()
            weights = self.trainable_variables
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": ops.zeros(()) if loss is None else loss}


def trained(compute: Any, *between: Any, callbacks: Any = ()) -> list[Any]:
    model = Model([layers.Input((6,)), layers.Dense(8, "relu", name="a"), *between, layers.Dense(3, name="b")])
    model.compute = compute
    model.compile("sgd")
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks)).history
    return [model.get_weights(), history["loss"]]


def error(model: Any, x: Any, y: Any) -> Any:
    return ops.mean((model(x, training=True) - y) ** 2)


def read(x: Any) -> Any:
    return [read(one) for one in x] if isinstance(x, (list, tuple)) else ops.convert_to_numpy(x)


# programs -------------------------------------------------------------------------------------------------------------


def a_closures_list() -> Any:
    losses = []

    def compute(model: Any, x: Any, y: Any) -> Any:
        losses.append(error(model, x, y))
        return losses[-1]

    return trained(compute), read(losses)


def a_closures_number() -> Any:
    count = 0

    def compute(model: Any, x: Any, y: Any) -> Any:
        nonlocal count
        count += 1
        return error(model, x, y) * (1 + count % 3)

    return trained(compute), count


def globals_of_a_module() -> Any:
    global STEPS
    STEPS = 0
    LOSSES.clear()

    def compute(model: Any, x: Any, y: Any) -> Any:
        global STEPS
        STEPS += 1
        LOSSES.append(error(model, x, y))
        return LOSSES[-1] * (1 + STEPS % 3)

    return trained(compute), STEPS, read(LOSSES)


class Record:
    def __init__(self) -> None:
        self.count, self.kept = 0, {"outputs": []}

    def note(self, output: Any) -> int:
        self.count += 1
        self.kept["outputs"].append((output.detach(), self.count))
        return self.count


def an_object() -> Any:
    """The callback's, which reads it between the steps, and empties it."""
    record, found = Record(), []

    class Reading(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found.append([(read(output), count) for output, count in record.kept["outputs"]])
            record.kept["outputs"].clear()

    def compute(model: Any, x: Any, y: Any) -> Any:
        output = model(x, training=True)
        return ops.mean((output - y) ** 2) * (1 + record.note(output) % 3)

    return trained(compute, callbacks=[Reading()]), record.count, found


def an_attribute() -> Any:
    """Held from step to step, and read by a later one, with its gradient."""

    def compute(model: Any, x: Any, y: Any) -> Any:
        model.losses_so_far = [*getattr(model, "losses_so_far", []), error(model, x, y)]
        if len(model.losses_so_far) < 2:
            return None
        total = sum(model.losses_so_far)
        model.losses_so_far = []
        return total

    return trained(compute)


def a_layers_attribute() -> Any:
    class Keeping(layers.Layer):
        def call(self, x: Any) -> Any:
            self.taken = (x, {"mean": ops.mean(x)})
            return x

    layer = Keeping()
    found = trained(error, layer)
    return found, read(layer.taken[0]), read(layer.taken[1]["mean"])


def a_hook() -> Any:
    class Hooked(layers.Layer):
        def call(self, x: Any) -> Any:
            return 2 * x

    taken: list[Any] = []
    layer = Hooked()
    layer.register_forward_hook(lambda module, given, output: taken.append(output))
    return trained(error, layer), read([x for x in taken if isinstance(x, torch.Tensor)])


def generators_of_random_numbers() -> Any:
    numpy, legacy, python = np.random.default_rng(3), np.random.RandomState(3), random.Random(3)
    generator = torch.Generator().manual_seed(3)

    class Drawing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            numpy.normal()

    def compute(model: Any, x: Any, y: Any) -> Any:
        share = float(numpy.beta(0.4, 0.4)) * legacy.uniform() * python.random()
        order = numpy.permutation(x.shape[0])
        return error(model, share * x + (1 - share) * x[order] + torch.randn(x.shape, generator=generator), y)

    return trained(compute, callbacks=[Drawing()]), numpy.normal(), legacy.uniform(), python.random()


def iterators() -> Any:
    more = (torch.from_numpy(X[k % 20 : k % 20 + 2]) for k in range(1000))
    counting = itertools.count()

    def compute(model: Any, x: Any, y: Any) -> Any:
        if not hasattr(model, "again") or next(counting) % 4 == 0:
            model.again = iter(list(X))
        return error(model, x, y) + ops.mean(model(next(more)) ** 2) + ops.mean(model(next(model.again)[None]) ** 2)

    return trained(compute), read(next(more)), next(counting)


class Counting(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x * (1 + self.calls % 3)


def what_a_layer_counts() -> Any:
    layer = Counting()
    return trained(error, layer), layer.calls


def parameters_that_torch_freezes() -> Any:
    model = keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh", name="a"), layers.Dense(3, name="b")])
    model.compile("sgd", "mse")
    found = []
    for frozen in (True, False, True):
        for parameter in model.layers[0].parameters():
            parameter.requires_grad_(not frozen)
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        found.append(model.get_weights())
    return found


class Centred(layers.Layer):
    """Begins with the mean of what it is first given."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[-1:], initializer="zeros")
        self.has_begun = False

    def call(self, x: Any, training: bool = False) -> Any:
        if training and not self.has_begun and x.device.type != "meta":
            self.has_begun = True
            with torch.no_grad():
                self.mean.assign(ops.mean(x, axis=0))
        return x - self.mean


def a_weight_that_a_call_writes() -> Any:
    return trained(error, Centred())


def gradients_of_gradients() -> Any:
    def compute(model: Any, x: Any, y: Any) -> Any:
        loss, values = error(model, x, y), [v.value for v in model.trainable_variables]
        gradients = torch.autograd.grad(loss, values, create_graph=True)
        kernel, bias, *_ = [value - 0.1 * gradient for value, gradient in zip(values, gradients, strict=True)]
        slopes.append(gradients[0])
        return loss + ops.mean((x @ kernel + bias) ** 2) + 0.1 * sum(ops.sum(g**2) for g in gradients)

    slopes: list[Any] = []
    return trained(compute), read(slopes)


def another_model() -> Any:
    """Which a step reads and writes, and the program in between, by tensors that it has held from the begin."""
    other = keras.Sequential([layers.Input((6,)), layers.Dense(4, name="c"), layers.Dense(3, name="d")])
    kernel, bias = (v.value for v in other.layers[0].variables)
    found = []

    class Writing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found.append(read([kernel.detach().clone(), bias.detach().clone()]))
            kernel.data.mul_(0.5)

    def compute(model: Any, x: Any, y: Any) -> Any:
        kernel, bias = other.layers[0].variables
        bias.assign(ops.mean(kernel, axis=0))
        loss = error(model, x, y) + ops.mean((x @ ops.convert_to_tensor(kernel) + ops.convert_to_tensor(bias)) ** 2)
        return loss

    return trained(compute, callbacks=[Writing()]), found, other.get_weights()


PROGRAMS = (
    *(a_closures_list, a_closures_number, globals_of_a_module, an_object, an_attribute, a_layers_attribute, a_hook),
    *(generators_of_random_numbers, iterators, what_a_layer_counts),
    *(parameters_that_torch_freezes, a_weight_that_a_call_writes, gradients_of_gradients),
    another_model,
)


# Each on one mesh, and on another in turn; what torch, a call and a step do to weights, on all.
ON_ALL = (what_a_layer_counts, parameters_that_torch_freezes, a_weight_that_a_call_writes, gradients_of_gradients)
ON_ALL += (another_model,)
# What is cut over the data axis is fetched for layers of the model that trains.
REFUSED = [(another_model, "zero 3")]
CASES = [
    (program, kind)
    for k, program in enumerate(PROGRAMS)
    for turn, kind in enumerate(STRATEGIES)
    if unless_all(program in ON_ALL or turn in (0, 1 + k % 3), True) and (program, kind) not in REFUSED
]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras says so of what torch has frozen
@pytest.mark.parametrize(("program", "kind"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_it_has_the_values_of_one_device(program: Callable[[], Any], kind: str) -> None:
    told = []
    for scope in (contextlib.nullcontext(), STRATEGIES[kind]().scope()):
        keras.utils.clear_session()
        keras.utils.set_random_seed(7)
        with scope:
            told.append(program())
    close(told[1], told[0])


def test_a_step_moves_nothing_of_models_that_are_merely_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the program has read of them."""
    moved: list[Any] = []
    for name in ("give", "take"):
        original = getattr(outside, name)
        monkeypatch.setattr(outside, name, lambda one, original=original: (moved.append(one), original(one)))
    with unidist.DataParallel().scope():
        models = [keras.Sequential([layers.Input((6,)), layers.Dense(3)]) for _ in range(10)]
        for model in models:
            model.compile("sgd", "mse")
            read([v.value.detach() for v in model.variables])
    models[3].train_on_batch(X, Y)
    moved.clear()
    models[3].train_on_batch(X, Y)
    assert {one.path for one in moved} >= {v.path for v in models[3].trainable_variables}
    assert {one.path for one in moved} <= {v.path for v in [*models[3].variables, *models[3].optimizer.variables]}

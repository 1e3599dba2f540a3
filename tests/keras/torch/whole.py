"""Runs in processes: models whose steps are whole programs, beside the same models run as they are."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import torch
from keras import layers
from torch._subclasses.fake_tensor import FakeTensor

import unidist
from tests.support.sampling import unless_all
from unidist.keras.records import model_record
from unidist.keras.torch.step import whole_steps
from unidist.keras.torch.step.whole_step import StepProgram

ROWS, BATCH, EPOCHS = 20, 8, 5  # two full batches and a ragged one
WIDE = 640  # features of a kernel whose gradient moves by itself
Built = tuple[keras.Model, np.ndarray]


def start() -> None:
    unidist.use("torch")


def start_without_compiling() -> None:
    """Programs run as they were traced."""
    torch._dynamo.config.disable = True
    start()


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, *shape)).astype("float32")


def _stack(*middle: keras.layers.Layer, **first: Any) -> keras.Model:
    return keras.Sequential([keras.Input((8,)), layers.Dense(12, "tanh", **first), *middle, layers.Dense(4)])


def _crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _compiled(model: keras.Model, optimizer: Any, jit: bool, loss: Any = None, **given: Any) -> keras.Model:
    model.compile(optimizer, loss or _crossentropy(), jit_compile=jit, **given)
    return model


class Centred(layers.Layer):
    """Looks at all rows of a batch."""

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0)


class Decides(layers.Layer):
    """Reads a value, which no program can."""

    def call(self, x: Any) -> Any:
        return x * 2 if float(keras.ops.sum(x)) > 0 else x


class Keeps(layers.Layer):
    """Leaves what it was given on itself."""

    last: Any = None

    def call(self, x: Any) -> Any:
        self.last = x
        return x


class Counting(layers.Layer):
    """Counts in a number of Python's, which a program reads once."""

    calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Remembering(layers.Layer):
    """Writes to a tensor of its own, which is no variable."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.seen = torch.zeros(())

    def call(self, x: Any) -> Any:
        self.seen += 1
        return x + 0.01 * self.seen


class TwoLosses(keras.losses.Loss):
    def call(self, y: Any, y_pred: Any) -> Any:
        one_hot = keras.ops.one_hot(keras.ops.squeeze(y, -1) if len(y.shape) > 1 else y, 4)
        return _crossentropy()(y, y_pred) + keras.losses.MeanSquaredError()(one_hot, y_pred)


class OwnStep(keras.Sequential):
    """A gradient penalty, and gradients by torch.autograd.grad."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        x = x.clone().requires_grad_()
        y_pred = self(x, training=True)
        loss = self.compute_loss(x, y, y_pred)
        (slope,) = torch.autograd.grad(y_pred.sum(), [x], create_graph=True)
        loss = loss + 0.1 * slope.square().sum(-1).mean()
        grads = torch.autograd.grad(loss, [v.value for v in self.trainable_weights])
        with torch.no_grad():
            self.optimizer.apply(list(grads), self.trainable_weights)
        return {"loss": loss.detach()}


class EverySecond(keras.Sequential):
    """Updates its weights in every second step, and looks at them in the others."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.turn = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        trainable = list(self.trainable_variables)
        grads = [v.value.grad for v in trainable]
        self.turn.assign_add(1)

        def update() -> Any:
            self.optimizer.apply(grads, trainable)
            return loss.detach()

        with torch.no_grad():
            look = lambda: keras.ops.sum(self.layers[0](x)) / 100  # noqa: E731
            return {"loss": keras.ops.cond(self.turn % 2 == 0, update, look)}


def _every_second(jit: bool) -> Built:
    model = EverySecond([keras.Input((8,)), layers.Dense(12, "tanh"), layers.Dense(4)])
    return _compiled(model, keras.optimizers.SGD(0.1, momentum=0.9), jit), rows(8)


def _own_step(jit: bool) -> Built:
    model = OwnStep([keras.Input((8,)), layers.Dense(12, "tanh"), layers.Dense(4)])
    return _compiled(model, keras.optimizers.SGD(0.1), jit), rows(8)


def _scaled(jit: bool) -> Built:
    """The first steps are not finite, so they are skipped; then the scale grows."""
    inner = keras.optimizers.Adam(1e-2, epsilon=1e-3)
    scaling = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**129, dynamic_growth_steps=3)
    return _compiled(_stack(), scaling, jit), rows(8)


def _averaged(jit: bool) -> Built:
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3, clipnorm=0.5, weight_decay=0.01)
    return _compiled(_stack(), optimizer, jit), rows(8)


class Draws(layers.Layer):
    """Adds what Keras's other distributions draw, and shuffles features."""

    def build(self, shape: Any) -> None:
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x: Any) -> Any:
        size = x.shape[-1]
        alpha, half = keras.ops.ones((size,)), keras.ops.full((size,), 0.5)
        drawn = [
            keras.random.gamma((size,), alpha, seed=self.seeds),
            keras.random.beta((size,), alpha, 2.0, seed=self.seeds),
            keras.random.binomial((size,), 3.0, half, seed=self.seeds),
            keras.ops.cast(keras.random.categorical(keras.ops.ones((1, 5)), size, seed=self.seeds)[0], x.dtype),
        ]
        return x + keras.random.shuffle(sum(drawn), seed=self.seeds) * 0.1


def _drawing(jit: bool) -> Built:
    return _compiled(_stack(Draws()), "rmsprop", jit), rows(8)


def _noisy(jit: bool) -> Built:
    middle = layers.GaussianNoise(0.3), layers.AlphaDropout(0.2), layers.Dropout(0.2)
    return _compiled(_stack(*middle), "rmsprop", jit, metrics=["accuracy"]), rows(8)


def _normed(jit: bool) -> Built:
    model = _stack(layers.BatchNormalization(), layers.LayerNormalization())
    return _compiled(model, keras.optimizers.Adam(1e-2, epsilon=1e-3), jit), rows(8)


_SIGNS = itertools.cycle((1e-8, -1e-8))


class Rounded(layers.Dense):
    """Its bias has a gradient of the other sign in every second call: rounding, which another order of sums gives."""

    def call(self, x: Any) -> Any:
        self.add_loss(next(_SIGNS) * keras.ops.sum(self.bias))
        return super().call(x)


def _rounding(jit: bool) -> Built:
    """A norm takes the bias away, so that its gradient is rounding alone, of which Adam makes whole steps."""
    first = Rounded(12), layers.BatchNormalization(), layers.Activation("tanh")
    return _compiled(keras.Sequential([keras.Input((8,)), *first, layers.Dense(4)]), "adam", jit), rows(8)


def _images(jit: bool) -> Built:
    convolved = layers.Conv2D(4, 3, activation="gelu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(4)
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.RandomFlip(), *convolved])
    return _compiled(model, keras.optimizers.Nadam(1e-2, epsilon=1e-3), jit), rows(8, 8, 3)


def _recurrent(jit: bool) -> Built:
    model = keras.Sequential([keras.Input((4, 2)), layers.LSTM(6, dropout=0.2), layers.Dense(4)])
    return _compiled(model, keras.optimizers.Adamax(1e-2, epsilon=1e-3), jit), rows(4, 2)


def _regularized(jit: bool) -> Built:
    first = {"kernel_regularizer": "l2", "activity_regularizer": "l1", "kernel_constraint": "max_norm"}
    return _compiled(_stack(**first), keras.optimizers.Adagrad(0.1), jit), rows(8)


def _attending(jit: bool) -> Built:
    given = keras.Input((4, 8))
    x = layers.LayerNormalization()(given + layers.MultiHeadAttention(4, 4, dropout=0.1)(given, given))
    model = keras.Model(given, layers.Dense(4)(layers.GlobalAveragePooling1D()(layers.Dense(8, "gelu")(x))))
    return _compiled(model, keras.optimizers.AdamW(1e-2, epsilon=1e-3), jit), rows(4, 8)


def _lowered(jit: bool) -> Built:
    policy = keras.mixed_precision.DTypePolicy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((8,)), layers.Dense(12, "tanh", dtype=policy), layers.Dense(4, dtype=policy)])
    return _compiled(model, keras.optimizers.Lion(1e-3), jit), rows(8)


def _in_float8(jit: bool) -> Built:
    """Its scales are gradients that are the next values, made by a function with a gradient of its own."""
    model = _stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.quantize("float8")
    return _compiled(model, keras.optimizers.SGD(0.1), jit), rows(8)


def _of(middle: Callable[[], keras.layers.Layer]) -> Callable[[bool], Built]:
    return lambda jit: (_compiled(_stack(middle()), keras.optimizers.SGD(0.1), jit), rows(8))


def _accumulated(jit: bool) -> Built:
    optimizer = keras.optimizers.Adam(1e-2, epsilon=1e-3, gradient_accumulation_steps=2, clipnorm=1.0)
    return _compiled(_stack(layers.Dropout(0.2)), optimizer, jit), rows(8)


def _of_two_losses(jit: bool) -> Built:
    return _compiled(_stack(), keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), jit, TwoLosses()), rows(8)


CASES: dict[str, Callable[[bool], Built]] = {
    "own step": _own_step,
    "every second": _every_second,
    "scaled": _scaled,
    "averaged": _averaged,
    "accumulated": _accumulated,
    "noisy": _noisy,
    "drawing": _drawing,
    "normed": _normed,
    "images": _images,
    "recurrent": _recurrent,
    "regularized": _regularized,
    "attending": _attending,
    "lowered": _lowered,
    "in float8": _in_float8,
    "centred": _of(Centred),
    "keeping": _of(Keeps),
    "two losses": _of_two_losses,
}
MADE: dict[str, Callable[[bool], Built]] = {**CASES, "rounding": _rounding}
# What no program can be: why, in a word.
AS_THEY_ARE = {
    "deciding": (_of(Decides), "it reads the value of a tensor ("),
    "counting": (_of(Counting), "run again, it gives other numbers for "),
    "remembering": (_of(Remembering), "the step writes to a tensor that no variable"),
}


def strategy_of(kind: str) -> Any:
    if kind == "data":
        return unidist.DataParallel()
    if kind == "2x2 sequence zero3":
        return unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2}), sequence_parallel=True, zero=3)
    if kind.startswith("zero"):
        return unidist.DataParallel(zero=int(kind[4]), offload="states" if kind.endswith("on the host") else "none")
    size = unidist.process_count()
    if kind == "sequence":
        return unidist.ModelParallel(unidist.Mesh({"model": size}), sequence_parallel=True)
    shape = {"model": size} if kind == "model" else {"data": 2, "model": size // 2}
    return unidist.ModelParallel(unidist.Mesh(shape))


# Whose evaluations and predictions are programs too.
EVALUATED = ("noisy", "normed", "centred")
# With a program of its own for a last batch that is not full: what mixes rows, or counts steps, or weighs losses.
RAGGED = ("normed", "centred", "rounding", "averaged", "accumulated", "two losses")
BESIDE_ONE_DEVICE = ("centred", "two losses")


def _numbers(name: str, model: keras.Model, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    given = {"batch_size": BATCH, "verbose": 0}
    epochs = EPOCHS if name in RAGGED else 3  # a program is proven by steps of its own shape
    found = model.fit(x, y, epochs=epochs, shuffle=False, **given).history
    for _ in range(3 if name in EVALUATED else 0):  # behind the steps that are compared
        found["evaluated"] = np.ravel(model.evaluate(x, y, **given))
        found["predicted"] = model.predict(x, **given)
    kept = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return {**found, "variables": [np.asarray(v, "float64") for v in kept]}


def trained(name: str, kind: str | None, jit: bool) -> tuple[dict[str, Any], keras.Model]:
    keras.utils.set_random_seed(3)
    build = MADE[name] if name in MADE else AS_THEY_ARE[name][0]
    with strategy_of(kind).scope() if kind else contextlib.nullcontext():
        model, x = build(jit)
    x = x if name in RAGGED else x[: 2 * BATCH]
    return _numbers(name, model, x, np.arange(len(x)) % 4), model


def _apart(found: Any, wanted: Any) -> float:
    pairs = zip(found.values(), wanted.values(), strict=True)
    flat = [(a, b) for one, other in pairs for a, b in zip([*one], [*other], strict=True)]
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in flat)


def sent_in(traffic: unidist.Ledger) -> Counter[Any]:
    """What was sent, without questions whether all go on. The second model's layers have numbers in their names."""
    events = [e for e in traffic.events if e.purpose != "agreement"]
    return Counter((e.op, e.axes, re.sub(r"_\d+", "", e.purpose), e.bytes) for e in events)


def compared(name: str, kind: str) -> dict[str, Any]:
    """A model trained as whole programs, and as it is: by the same strategy, and some by plain Keras too."""
    alone = [trained(name, None, False)[0]] if name in BESIDE_ONE_DEVICE else []
    with unidist.ledger() as plain:
        wanted, _ = trained(name, kind, False)
    with unidist.ledger() as traffic:
        found, model = trained(name, kind, True)
    steps = model_record.of(model).engine.whole_steps
    model(np.zeros((2, *model.input_shape[1:]), "float32"))  # nothing of the traces is left in it
    return {
        "apart": max(_apart(found, other) for other in (wanted, *alone)),
        "sent": (sent_in(traffic), sent_in(plain)),
        "programs": (steps.traced, steps.compiled),
        "why": dict(steps.why),
        "told": dict(unidist.describe(model).why).get("train step", ""),
    }


class UnderWay(keras.callbacks.Callback):
    """Notes of how many units the joining goes on behind each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        fetcher = model_record.of(self.model).engine.traffic._fetchers[unidist.process_index()]
        self.counts.append(sum(unit.is_coming for unit in fetcher.units))


def going_on() -> tuple[list[int], set[str], bool]:
    """Of how many units joins go on behind each step of ZeRO-1, and the collectives of its programs.

    Also whether the programs give what the joins read, in memory that is no variable's.
    """
    keras.utils.set_random_seed(3)
    with unidist.DataParallel(zero=1).scope():
        model, x = _of_two_losses(True)
    noting = UnderWay()
    x = x[: 2 * BATCH]
    model.fit(x, np.arange(len(x)) % 4, batch_size=BATCH, epochs=3, verbose=0, callbacks=[noting])
    programs = model_record.of(model).engine.whole_steps._programs.values()
    nodes = [node for program in programs for node in program.graph.graph.nodes]
    given = [x for node in nodes if node.op == "output" for x in node.args[0]]
    read = [x.args[0] for x in given if getattr(x.target, "namespace", "") == "_c10d_functional"]
    kept = bool(read) and all(x in given and x.op != "placeholder" for x in read)
    called = {str(node.target) for node in nodes}
    return noting.counts, {name.split(".")[1] for name in called if name.startswith("_c10d_functional.")}, kept


def left_behind() -> list[int]:
    """How many added losses without values are on layers behind each trace."""
    found: list[int] = []
    original = StepProgram.trace

    def trace(self: StepProgram, *given: Any) -> None:
        original(self, *given)
        losses = [loss for owner in self._owners for loss in getattr(owner, "_losses", ())]
        found.append(sum(isinstance(getattr(loss, "local", loss), FakeTensor) for loss in losses))

    with mock.patch.object(StepProgram, "trace", trace):
        trained("regularized", "data", True)
    return found


def told(name: str) -> tuple[dict[str, Any], list[str]]:
    """Of a step that is no program: `compared`, and what unidist logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("unidist.keras.torch.step.whole_steps")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        return compared(name, "data"), said
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class OwnLengths(keras.utils.PyDataset):
    """Batches of this process's own, whose lengths another process does not know."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self._process = process

    def __len__(self) -> int:
        return 6

    def __getitem__(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(10 * self._process + k)
        count, length = 4 - self._process, 3 + self._process * (k // 2)
        return rng.normal(size=(count, length, 2)).astype("float32"), np.arange(count)


def of_own_lengths() -> tuple[float, dict[str, str], int, int]:
    """How far programs are from steps as they are, why they are none, and how many there are."""
    runs = []
    for jit in (True, False):
        keras.utils.set_random_seed(3)
        with unidist.DataParallel(auto_shard_dataset=False).scope():
            inner = [layers.GRU(6), layers.Dense(4)]
            model = _compiled(keras.Sequential([keras.Input((None, 2)), *inner]), keras.optimizers.SGD(0.1), jit)
        history = model.fit(OwnLengths(unidist.process_index()), epochs=2, shuffle=False, verbose=0).history
        runs.append({**history, "weights": [np.asarray(w) for w in model.weights]})
        if jit:
            steps = model_record.of(model).engine.whole_steps
    return _apart(*runs), dict(steps.why), steps.traced, steps.compiled


class Steering(keras.callbacks.Callback):
    """Sets the learning rate, weights, and which layers train."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        model: Any = self.model
        model.optimizer.learning_rate = 0.1 / (epoch + 1)
        if epoch == 3:
            model.layers[-1].set_weights([w + 0.1 for w in model.layers[-1].get_weights()])


class Freezing(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        model: Any = self.model
        model.layers[0].trainable = epoch != 2


def steered() -> tuple[float, tuple[int, int]]:
    """How far a fit that callbacks change is from the same one as it is; programs traced and compiled in fit."""
    found = []
    for jit in (True, False):
        keras.utils.set_random_seed(3)
        with unidist.DataParallel().scope():
            model = _compiled(_stack(), keras.optimizers.SGD(0.1, momentum=0.9), jit)
        x, y = rows(8)[: 2 * BATCH], np.arange(2 * BATCH) % 4
        given = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, callbacks=[Steering(), Freezing()], **given).history
        if jit:
            steps = model_record.of(model).engine.whole_steps
        found.append({**history, "weights": [np.asarray(w) for w in model.weights]})
    return _apart(*found), (steps.traced, steps.compiled)


def compiled_again() -> float:
    """How far a fit with a loss that is compiled later, with the same optimizer, is from the same one as it is."""
    found = []
    for jit in (True, False):
        keras.utils.set_random_seed(3)
        with unidist.DataParallel().scope():
            model = _compiled(_stack(), keras.optimizers.SGD(0.01), jit)
        x, y = rows(8)[: 2 * BATCH], np.arange(2 * BATCH) % 4
        given = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(**given, epochs=3)
        _compiled(model, model.optimizer, jit, keras.losses.SparseCategoricalCrossentropy(True, reduction="sum"))
        found.append({**model.fit(**given).history, "weights": [np.asarray(w) for w in model.weights]})
    return _apart(*found)


class Factor(layers.Layer):
    """Multiplies by a number that is no variable."""

    factor = 1.0

    def call(self, x: Any) -> Any:
        return x * self.factor


class Doubling(keras.callbacks.Callback):
    """Changes the number when the program is proven: the program has the old one."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        model: Any = self.model
        model.layers[1].factor = 2.0 if batch > 4 else 1.0


def checked(how: str) -> dict[str, str]:
    """Why a program is none any more whose number has changed, where UNIDIST_CHECK says how much is compared."""
    with unidist.DataParallel().scope():
        model = _compiled(_stack(Factor()), keras.optimizers.SGD(0.1), True)
    with mock.patch.dict(os.environ, {"UNIDIST_CHECK": how}), mock.patch.object(whole_steps, "AGAIN", 4):
        x = rows(8)[: 2 * BATCH]
        x = np.concatenate([x] * 6)
        model.fit(x, np.arange(len(x)) % 4, batch_size=BATCH, verbose=0, callbacks=[Doubling()])
    return model_record.of(model).engine.whole_steps.why


def scheduled() -> tuple[int, int]:
    """Programs of a fit with a ragged batch, a schedule, and a callback that logs."""
    with unidist.DataParallel().scope():
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
        model = _compiled(_stack(), keras.optimizers.Adam(rate), True)
    model.fit(rows(8), np.arange(ROWS) % 4, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    steps = model_record.of(model).engine.whole_steps
    return steps.traced, steps.compiled


def without_a_compiler() -> tuple[tuple[float, int], list[str], list[str]]:
    """`compiled` of ZeRO-1 where torch finds no compiler; what unidist warns of; what torch wrote for the compiler.

    Of that the products of matrices, collectives and waits of a step, in their order.
    """
    from torch._inductor.utils import run_and_get_code  # the compiler takes a second to import

    said: list[str] = []

    def made(jit: bool) -> Built:
        model = keras.Sequential([keras.Input((WIDE,)), *(layers.Dense(WIDE) for _ in range(3))])
        return _compiled(model, keras.optimizers.SGD(0.1), jit, "mse"), np.ones((BATCH, WIDE), "float32") / WIDE

    with (
        mock.patch.object(torch._inductor.config.cpp, "cxx", ("no-such-compiler",)),
        torch._inductor.config.patch(force_disable_caches=True),
        mock.patch.object(whole_steps._log, "warning", lambda text, *args: said.append(text % args)),
    ):
        found, codes = run_and_get_code(_beside_as_it_is, made, lambda x: x, 1)
    called = r"extern_kernels\.(\w*mm)\(|_c10d_functional\.(\w+)\.default\("
    return found, said, ["".join(names) for names in re.findall(called, codes[-1])]


def compiled() -> tuple[float, int]:
    """How far a fit by a compiled program is from the same one as it is, and how many programs there are."""

    def made(jit: bool) -> Built:
        return _compiled(_stack(), keras.optimizers.SGD(0.1, momentum=0.9), jit), rows(8)

    return _beside_as_it_is(made, lambda x: np.arange(len(x)) % 4)


def _beside_as_it_is(
    build: Callable[[bool], Built], wanted: Callable[[np.ndarray], np.ndarray], zero: int = 0
) -> tuple[float, int]:
    runs = []
    for jit in (True, False):
        keras.utils.set_random_seed(3)
        with unidist.DataParallel(zero=zero).scope():
            model, x = build(jit)
        x = x[:BATCH]
        history = model.fit(x, wanted(x), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
        runs.append({**history, "weights": [np.asarray(w) for w in model.weights]})
        if jit:
            count = model_record.of(model).engine.whole_steps.compiled
    return _apart(*runs), count


class Leaving(keras.callbacks.Callback):
    """Ends process 1 before a step that is a program alone."""

    steps = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == EPOCHS and unidist.process_index() == 1:
            os._exit(9)


def lost() -> tuple[str, float]:
    """What process 0 is told in a program, and after how many seconds."""
    with unidist.DataParallel().scope():
        model, x = _averaged(True)
    began = time.monotonic()
    with pytest.raises(unidist.ProcessLostError) as caught:
        model.fit(x, np.arange(ROWS) % 4, batch_size=ROWS, epochs=EPOCHS, verbose=0, callbacks=[Leaving()])
    assert model_record.of(model).engine.whole_steps.compiled == 1
    return str(caught.value), time.monotonic() - began


def of_every_optimizer() -> dict[str, float]:
    """Name of an optimizer -> how far whole programs are from steps as they are."""
    found = {}
    for name in OPTIMIZERS:
        runs = []
        for jit in (True, False):
            keras.utils.set_random_seed(3)
            kind = getattr(keras.optimizers, name)
            with unidist.DataParallel().scope():
                model = _compiled(_stack(), kind(1e-2, **({"epsilon": 1e-3} if name not in _PLAIN else {})), jit)
            model.fit(rows(8)[:BATCH], np.arange(BATCH) % 4, batch_size=BATCH, epochs=4, shuffle=False, verbose=0)
            runs.append(
                {"variables": [np.asarray(v, "float64") for v in [*model.variables, *model.optimizer.variables]]}
            )
            if jit:
                assert not model_record.of(model).engine.whole_steps.why
        found[name] = _apart(*runs)
    return found


_PLAIN = ("SGD", "Lion", "Ftrl", "Adafactor", "Muon")
# The others are those of CASES; Nadam has an update of all variables that is its own.
OPTIMIZERS = [
    *unless_all((), ("SGD", "Adam", "AdamW", "Adagrad", "Adamax", "RMSprop", "Lion", "Adadelta", "Ftrl")),
    *("Nadam", "Adafactor"),
    *(["Muon"] if hasattr(keras.optimizers, "Muon") else []),
]

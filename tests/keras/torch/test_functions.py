"""Layers of one's own with derivatives of their own: functions with a backward, torch's transforms."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist
from tests.keras.torch.models import assert_equal, features, train
from tests.support.sampling import unless_all
from unidist.keras import hooks
from unidist.keras.torch.params import param_groups


class Rounded(torch.autograd.Function):
    """Gradients pass as if nothing had been rounded."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Scaled(torch.autograd.Function):
    """Two results, one of all rows. Its backward mixes rows."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        return x * factor, x.sum()

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first / (1 + first.abs().max()) + second * torch.tanh(x), None


@ops.custom_gradient
def turned(x):
    """Gradients are turned round, as between domains."""

    def grad(*args, upstream=None):
        return -0.5 * (args[0] if upstream is None else upstream)

    return ops.tanh(x), grad


def scaled(x):
    y, total = Scaled.apply(x, 0.5)
    return y + 0.01 * total


def downhill(x):
    """A step down an energy, as of a model of forces."""
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((at**3).sum() + torch.sin(at).mean(), at, create_graph=True)
    return x - 0.1 * slope


FUNCTIONS = {
    "a backward of one's own": lambda x: Rounded.apply(x),
    "two results": scaled,
    "a custom gradient": turned,
    "a gradient of the input": downhill,
    "torch.func.grad": lambda x: x + 0.1 * torch.func.grad(lambda z: (z**3).sum())(x),
    "torch.func.jacrev": lambda x: torch.vmap(torch.func.jacrev(torch.tanh))(x).sum(-1),
    "torch.func.vjp": lambda x: torch.func.vjp(torch.tanh, x)[1](0.5 * x)[0],
    "a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda z: 2 * torch.tanh(z), x, use_reentrant=True),
}


COUNTED = {
    "product": lambda x: 0.1 * x * ops.shape(x)[0],
    "mean by hand": lambda x: x - ops.cast(1 / ops.shape(x)[0], x.dtype),
    "cast": lambda x: x / ops.cast(ops.shape(x)[0], x.dtype),
    "length": lambda x: x / len(x),
    "size": lambda x: x * 8 / x.numel(),
    "float": lambda x: x / float(x.shape[0]),
    "int": lambda x: x / int(x.size(0)),
    "numbered": lambda x: x + 0.01 * ops.cast(ops.arange(ops.shape(x)[0]), x.dtype)[:, None],
}
SHAPED = {
    "ones": lambda x: x + ops.ones((ops.shape(x)[0], 1)),
    "reshaped": lambda x: ops.reshape(ops.reshape(x, (ops.shape(x)[0], 2, -1)), (-1, 8)),
    "of no shape": lambda x: ops.tanh(x),
}


class Held(torch.autograd.Function):
    """Gradients are held within bounds."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


@ops.custom_gradient
def held(x):
    return x * 1.0, lambda *args, upstream=None: ops.clip(upstream, -0.01, 0.01)


class OfWeights(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 4), name="kernel")

    def call(self, x):
        return x @ self._function(ops.convert_to_tensor(self.kernel))


class Applied(layers.Layer):
    def __init__(self, name):
        super().__init__()
        self._function = {**FUNCTIONS, **COUNTED, **SHAPED}[name]

    def call(self, x):
        return self._function(x)


class Potential(layers.Layer):
    """Gives the slope of an energy of each row, which weights of its own make, and those of a layer inside."""

    def __init__(self, transform):
        super().__init__()
        self.inner = layers.Dense(6, "tanh")
        self.transform = transform

    def build(self, shape):
        self.kernel = self.add_weight((6, 6), initializer="orthogonal", name="kernel")
        self.inner.build(shape)

    def call(self, x):
        kernel = ops.convert_to_tensor(self.kernel)

        def energy(row):
            return torch.sum(torch.tanh(self.inner(row[None]) @ kernel) ** 3)

        return x - 0.1 * torch.vmap(self.transform(energy))(x)

    def compute_output_shape(self, shape):
        return shape


def slopes(energy):
    return lambda row: torch.func.vjp(energy, row)[1](torch.ones(()))[0]


# Looked up when they are called: they are replaced in a step.
TRANSFORMS = {
    "grad": lambda energy: torch.func.grad(energy),
    "jacrev": lambda energy: torch.func.jacrev(energy),
    "vjp": slopes,
}


@pytest.fixture
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


# Each transform at each stage, and under each policy.
SOME = [
    *(("float32", name, zero) for name, zero in (("grad", 3), ("jacrev", 1), ("vjp", 3))),
    *(("mixed_bfloat16", name, zero) for name, zero in (("grad", 1), ("jacrev", 3), ("vjp", 1))),
]
SLOPES = list(itertools.product(("float32", "mixed_bfloat16"), TRANSFORMS, (1, 3)))


@pytest.mark.parametrize(("policy", "name", "zero"), unless_all(SOME, SLOPES), indirect=["policy"])
def test_slopes_of_what_weights_make_train(name, zero, policy, monkeypatch):
    """Units of one layer each: what backward needs of them is let go by others."""
    monkeypatch.setattr(param_groups, "UNIT_BYTES", 1)

    def build():
        inputs = layers.Input((12,))
        x = Potential(TRANSFORMS[name])(layers.Dense(8, "tanh")(inputs))
        return keras.Model(inputs, layers.Dense(3)(layers.Dense(8, "tanh")(x)))

    x, y = features()
    # Of 16 bits the casts are those of whole values, to the bit.
    wanted = train(build, x, y, None if policy == "float32" else unidist.DataParallel())
    assert_equal(train(build, x, y, unidist.DataParallel(zero=zero)), wanted)


CASES = [(name, zero) for name in FUNCTIONS for zero in (0, 3)]


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")  # where Keras infers shapes
@pytest.mark.parametrize(("name", "zero"), CASES)
def test_derivatives_of_ones_own_are_of_all_rows(name, zero):
    def build():
        inputs = layers.Input((12,))
        x = Applied(name)(layers.Dense(8, "tanh")(inputs))
        return keras.Model(inputs, layers.Dense(3)(x))

    x, y = features()
    with unidist.ledger() as sent:
        found = train(build, x, y, unidist.DataParallel(zero=zero))
    wanted = train(build, x, y)
    assert_equal(found, wanted)
    assert sent.count("all_reduce") or sent.count("reduce_scatter")
    before = [np.asarray(v) for v in train(build, x, y, epochs=0).model.weights]
    assert all(not np.allclose(a, b, atol=1e-6) for a, b in zip(before, wanted.weights, strict=True))


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")  # where Keras infers shapes
@pytest.mark.parametrize(("function", "zero"), [(lambda x: Held.apply(x), 0), (held, 0), (held, 3)])
def test_a_derivative_of_weights_alone_is_of_all_rows(function, zero):
    x, y = features()
    build = lambda: keras.Sequential([layers.Input((12,)), OfWeights(function), layers.Dense(3)])  # noqa: E731
    found, wanted = (train(build, x, y, given) for given in (unidist.DataParallel(zero=zero), None))
    assert_equal(found, wanted)


def test_a_custom_gradient_gathers_no_rows():
    x, y = features()
    build = lambda: keras.Sequential([layers.Input((12,)), Applied("a custom gradient"), layers.Dense(3)])  # noqa: E731
    with unidist.ledger() as sent:
        train(build, x, y, unidist.DataParallel())
    assert not sent.count("all_gather")


@pytest.mark.parametrize("name", [*COUNTED, *SHAPED])
def test_a_layer_that_computes_with_the_number_of_rows_knows_that_of_all(name):
    def build():
        return keras.Sequential([layers.Input((12,)), layers.Dense(8, "tanh"), Applied(name), layers.Dense(3)])

    x, y = features(22)
    found, wanted = (train(build, x, y, given) for given in (unidist.DataParallel(), None))
    assert_equal(found, wanted)


def test_an_apply_that_was_kept_is_refused():
    hooks.remove()
    kept = Rounded.apply
    unidist.use("sim", devices=4)

    class Kept(layers.Layer):
        def call(self, x):
            return kept(x)

    x, y = features()
    with pytest.raises(unidist.CapabilityError, match=r"Say lambda x: MyFunction\.apply"):
        train(lambda: keras.Sequential([layers.Input((12,)), layers.Dense(3), Kept()]), x, y, unidist.DataParallel())

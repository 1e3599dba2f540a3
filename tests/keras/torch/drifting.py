"""Models whose ranks compute the same and get other last bits, and what runs of them in two real processes."""

from __future__ import annotations

import hashlib

import keras
import numpy as np
import torch
from keras import layers

import unidist
from tests.keras.torch.models import compiling_by, features, held, model_parallel
from unidist.keras.records import model_record
from unidist.keras.torch import context
from unidist.keras.torch.world import RankWorld

CUT = ("up/kernel", "up/bias", "down/kernel")
RULES = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
# A last bit of what the ranks behind the first compute.
BIT = 2.0**-23


def other_bits(x):
    """A number of this rank's, as another rank may have it."""
    here = context.frame()
    if here is None:
        place = unidist.process_index()
    else:
        place = sum(k for axis, k in here.world.mesh.coordinate(here.rank).items() if axis != "data")
    return x * (1.0 + BIT * place)


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return other_bits(x)

    @staticmethod
    def backward(ctx, grad):
        return other_bits(grad)


class Rounds(layers.Layer):
    """Computes in an order of the moment."""

    def call(self, x):
        return Rounding.apply(x) if torch.is_tensor(x) and not x.is_meta else x


def built(*shape, kind=keras.Model):
    given = x = keras.Input(shape or (12,))
    for layer in (
        layers.Dense(8, "tanh", name="first"),
        Rounds(),
        layers.LayerNormalization(name="norm"),
        layers.Dense(16, "tanh", name="up"),
        layers.Dense(8, name="down"),
        Rounds(),
        layers.Dense(3, name="last"),
        Rounds(),
    ):
        x = layer(x)
    return kind(given, x)


def strategy(axes, **options):
    mesh = unidist.Mesh(axes)
    model_axis = tuple(axis for axis in axes if axis != "data")
    return model_parallel(RULES, mesh, model_axis=model_axis, **options)


def adam(**options):
    return keras.optimizers.Adam(1e-2, epsilon=1e-3, **options)


# what two processes run -----------------------------------------------------------------------------------------------


def start():
    """The processes are as if on GPUs: ranks that compute the same may get other last bits."""
    unidist.use("torch")
    RankWorld.rounds_alike = False


def digest(model):
    """Of what is whole on each rank: weights, and what an optimizer keeps of them."""
    kept = [v for v in [*model.trainable_variables, *model.optimizer.variables] if v._storage.is_whole]
    return hashlib.sha256(b"".join(v.value.detach().cpu().numpy().tobytes() for v in kept)).hexdigest()


def fitted(compiled):
    """(digest, logs, rate, epochs) of a fit that ends by its logs, whose last bits decide."""
    keras.utils.set_random_seed(5)
    with compiling_by("aot_eager"):
        with strategy({"model": 2}).scope():
            model = built()
            model.compile(adam(), "mse", metrics=["mae"], jit_compile=compiled)
        slower = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=0, min_delta=0.1)
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=0.1)
        x, y = features()
        log = model.fit(
            x, y, batch_size=5, epochs=12, verbose=0, callbacks=[slower, stopping], validation_data=(x + 0.1, y)
        )
    return digest(model), log.history, float(model.optimizer.learning_rate), len(log.epoch)


def looped(derived):
    """(digest, how far the weights are from one device's) of a loop of the program's own."""
    x, y = features()

    def run(chosen):
        keras.utils.set_random_seed(5)
        model = built()
        if chosen is not None:
            unidist.parallelize(model, chosen)
        optimizer = adam()
        optimizer.build(model.trainable_variables)
        for _ in range(4):
            model.zero_grad()
            loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
            trainable = model.trainable_variables
            own = [held(v) for v in trainable]
            if not derived:
                loss.backward()
            grads = torch.autograd.grad(loss, own) if derived else [one.grad for one in own]
            with torch.no_grad():
                optimizer.apply(list(grads), trainable)
        model.optimizer = optimizer
        return model

    wanted = [np.asarray(v) for v in run(None).weights]
    found = run(strategy({"model": 2}))
    assert model_record.of(found).engine is not None
    apart = max(np.abs(np.asarray(a) - b).max() for a, b in zip(found.weights, wanted, strict=True))
    return digest(found), float(apart)

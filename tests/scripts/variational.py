"""A variational autoencoder of small pictures."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.scripts.stepping import OwnStep

ROWS, BATCH, SIZE, LATENT = 20, 8, 8, 2


class Sampling(layers.Layer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, spread = inputs
        noise = keras.random.normal((ops.shape(mean)[0], ops.shape(mean)[1]), seed=self.seed_generator)
        return mean + ops.exp(0.5 * spread) * noise


def encoder() -> Any:
    picture = keras.Input((SIZE, SIZE, 1))
    x = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu", name="conv")(picture)
    x = layers.Dense(8, "relu", name="code")(layers.Flatten()(x))
    mean, spread = layers.Dense(LATENT, name="mean")(x), layers.Dense(LATENT, name="spread")(x)
    return keras.Model(picture, [mean, spread, Sampling(name="sampling")([mean, spread])], name="encoder")


def decoder() -> Any:
    latent = keras.Input((LATENT,))
    x = layers.Reshape((4, 4, 4))(layers.Dense(64, "relu", name="wide")(latent))
    x = layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid", name="picture")(x)
    return keras.Model(latent, x, name="decoder")


def losses(picture: Any, outputs: Any) -> tuple[Any, Any]:
    mean, spread, again = outputs
    apart = ops.mean(ops.sum(keras.losses.binary_crossentropy(picture, again), axis=(1, 2)))
    return apart, divergence(mean, spread)


def divergence(mean: Any, spread: Any) -> Any:
    return ops.mean(ops.sum(-0.5 * (1 + spread - ops.square(mean) - ops.exp(spread)), axis=1))


class Variational(OwnStep):
    def __init__(self) -> None:
        super().__init__(name="variational")
        self.encoder, self.decoder = encoder(), decoder()

    def call(self, picture: Any, training: Any = None) -> Any:
        mean, spread, code = self.encoder(picture)
        return mean, spread, self.decoder(code)

    def objective(self, x: Any, outputs: Any) -> Any:
        return sum(losses(x, outputs))


class ByComputeLoss(Variational):
    def objective(self, x: Any, outputs: Any) -> Any:
        return self.compute_loss(x=x, y_pred=outputs)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return sum(losses(x, y_pred))


class Half(Variational):
    """One part of the loss by a loss of Keras's, one by hand."""

    def objective(self, x: Any, outputs: Any) -> Any:
        mean, spread, again = outputs
        return 64 * keras.losses.BinaryCrossentropy()(x, again) + divergence(mean, spread)


class ByAddLoss(layers.Layer):
    """The divergence where the codes are made."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(divergence(*inputs))
        return inputs


def _train(model: Any, steps: int, **compiled: Any) -> dict[str, Any]:
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), **compiled)
    picture = np.random.default_rng(2).uniform(size=(ROWS, SIZE, SIZE, 1)).astype("float32")
    target = {"y": picture} if compiled else {}
    history = model.fit(picture, **target, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history
    grid = np.array([[-1.0, 1.0], [0.5, 0.5]], "float32")
    return {
        "loss": history["loss"],
        "codes": model.get_layer("encoder").predict(picture[:5], verbose=0)[0],
        "drawn": model.get_layer("decoder").predict(grid, verbose=0),
        "weights": model.get_weights(),
    }


def run(steps: int = 2) -> dict[str, Any]:
    return _train(ByComputeLoss(), steps)


def run_by_hand(steps: int = 2) -> dict[str, Any]:
    return _train(Variational(), steps)


def run_half_by_hand(steps: int = 2) -> dict[str, Any]:
    return _train(Half(), steps)


def run_as_a_graph(steps: int = 2) -> dict[str, Any]:
    """Without a step of one's own: what is added to the loss stands in the graph."""
    picture = keras.Input((SIZE, SIZE, 1))
    mean, spread, code = encoder()(picture)
    mean, spread = ByAddLoss(name="divergence")([mean, spread])
    model = keras.Model(picture, decoder()(code) + 0 * ops.sum(mean), name="variational")
    return _train(model, steps, loss="binary_crossentropy")

"""A variational autoencoder with a `train_step` of its own, on torch: pictures of a spot, by two numbers each.

    python examples/vae.py
    unidist run -n 4 examples/vae.py

It prints:

    error: of the mean picture 6..., before the training ..., after it ...
    two numbers say more than the mean picture: True
"""

import unidist

unidist.use(devices=4)

import keras
import numpy as np
import torch
from keras import ops

SIDE = 12


def pictures(count: int, seed: int) -> np.ndarray:
    """A bright spot, anywhere: what differs between two pictures are its row and its column."""
    row, column = np.random.default_rng(seed).uniform(2, SIDE - 3, (2, count, 1, 1))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    spots = np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 8)
    return spots.reshape(count, SIDE * SIDE).astype("float32")


class Vae(keras.Model):
    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.encoder = keras.Sequential([keras.Input((SIDE * SIDE,)), dense(64, "relu"), dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), dense(64, "relu"), dense(SIDE * SIDE, "sigmoid")])
        self.seeds = keras.random.SeedGenerator(1)
        self.total = keras.metrics.Mean(name="loss")

    def call(self, x):
        mean, _ = ops.split(self.encoder(x), 2, axis=1)
        return self.decoder(mean)

    def train_step(self, x):
        self.zero_grad()
        mean, log_variance = ops.split(self.encoder(x, training=True), 2, axis=1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)  # for all rows: that of one device
        made = self.decoder(mean + ops.exp(log_variance / 2) * noise, training=True)
        error = ops.sum(ops.square(x - made), axis=1)
        divergence = ops.sum(ops.square(mean) + ops.exp(log_variance) - 1 - log_variance, axis=1) / 2
        loss = ops.mean(error + 0.02 * divergence)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        self.total.update_state(loss.detach())
        return {"loss": self.total.result()}


keras.utils.set_random_seed(0)
with unidist.DataParallel().scope():
    vae = Vae()
    vae.compile(keras.optimizers.Adam(0.02))

test = pictures(100, seed=1)


def error(made: np.ndarray) -> float:
    return float(np.square(test - made).sum(1).mean())


of_mean, before = error(test.mean(0)), error(vae.predict(test, verbose=0))
vae.fit(pictures(384, seed=0), batch_size=64, epochs=8, verbose=0)
after = error(vae.predict(test, verbose=0))
if unidist.process_index() == 0:
    print(f"error: of the mean picture {of_mean:.3f}, before the training {before:.3f}, after it {after:.3f}")
    print("two numbers say more than the mean picture:", after < of_mean / 2)

"""Diffusion: a small net learns to tell points of a ring from noise that is mixed in, and makes such points of noise.

A mixture is cos(angle) * point + sin(angle) * noise, and the net says how it changes with the angle. Noise and angles
are drawn inside of the model, for all rows of a batch as one device does.

    python examples/diffusion.py
    unidist run -n 4 examples/diffusion.py

It prints:

    mean distance from the ring: of noise 0..., of what is made 0...
    near it: True, all around it: True
"""

import itertools

import unidist

unidist.use(devices=4)

import keras
import numpy as np
from keras import ops


def inputs(mixed, angle):
    waves = [f(k * angle) for k in (1, 2, 4) for f in (ops.sin, ops.cos)]
    return ops.concatenate([mixed, *waves], axis=1)


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        hidden = [keras.layers.Dense(96, "silu") for _ in range(3)]
        self.net = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(2)])
        self.seeds = keras.random.SeedGenerator(0)

    def call(self, points):
        """By how much the net is wrong."""
        rows = ops.shape(points)[0]
        angle = keras.random.uniform((rows, 1), 0, np.pi / 2, seed=self.seeds)
        noise = keras.random.normal((rows, 2), seed=self.seeds)
        mixed = ops.cos(angle) * points + ops.sin(angle) * noise
        return self.net(inputs(mixed, angle)) - (ops.cos(angle) * noise - ops.sin(angle) * points)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred))


def made(model: Diffusion, noise: np.ndarray, steps: int = 20) -> np.ndarray:
    """Points of noise, which is taken away step by step."""
    mixed, angles = noise, np.linspace(np.pi / 2, 0, steps + 1)
    for angle, less in itertools.pairwise(angles):
        given = ops.convert_to_numpy(inputs(mixed, np.full((len(mixed), 1), angle, "float32")))
        change = model.net.predict(given, batch_size=len(given), verbose=0)
        point, rest = np.cos(angle) * mixed - np.sin(angle) * change, np.sin(angle) * mixed + np.cos(angle) * change
        mixed = (np.cos(less) * point + np.sin(less) * rest).astype("float32")
    return mixed


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
angles = rng.uniform(0, 2 * np.pi, 4096)
ring = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
with unidist.DataParallel().scope():
    model = Diffusion()
    model.compile(keras.optimizers.Adam(0.01))
model.fit(ring, batch_size=512, epochs=25, verbose=0)

noise = rng.normal(size=(256, 2)).astype("float32")
points = made(model, noise)
far = [float(np.abs(np.linalg.norm(x, axis=1) - 1).mean()) for x in (noise, points)]
quarters = np.histogram(np.arctan2(points[:, 1], points[:, 0]), 4, (-np.pi, np.pi))[0]
if unidist.process_index() == 0:
    print(f"mean distance from the ring: of noise {far[0]:.2f}, of what is made {far[1]:.2f}")
    print(f"near it: {far[1] < far[0] / 2}, all around it: {quarters.min() > 32}")

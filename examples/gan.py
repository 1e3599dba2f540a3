"""A GAN: two models, two optimizers, and a `train_step` of its own, on torch. Its numbers shall have mean 3.

The noise comes with the data, so that it is the same on one device and on four.

    python examples/gan.py
    unidist run -n 4 examples/gan.py

It prints:

    mean of what is made: before ..., after ...
    nearer to 3: True
"""

import unidist

unidist.use(devices=4)

import keras
import numpy as np
import torch
from keras import ops


def small(inputs: int, outputs: int, name: str) -> keras.Model:
    layers = [keras.Input((inputs,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(outputs)]
    return keras.Sequential(layers, name=name)


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.maker, self.judge = small(4, 1, "maker"), small(1, 1, "judge")
        self.built = True

    def compile(self, maker, judge):
        super().compile()
        self.optimizers = {"maker": maker, "judge": judge}
        self.error = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, noise):
        return self.judge(self.maker(noise))

    def improve(self, model, loss):
        """One step of one of the two models."""
        self.zero_grad()
        loss.backward()
        weights = model.trainable_weights
        with torch.no_grad():
            self.optimizers[model.name].apply([weight.value.grad for weight in weights], weights)

    def train_step(self, data):
        (real, noise), _, _ = keras.utils.unpack_x_y_sample_weight(data)
        ones, zeros = ops.ones((len(real), 1)), ops.zeros((len(real), 1))
        made = self.maker(noise, training=True).detach()
        judged = self.judge(ops.concatenate([real, made], axis=0), training=True)
        self.improve(self.judge, self.error(ops.concatenate([ones, zeros], axis=0), judged))
        fooled = self.error(ones, self.judge(self.maker(noise, training=True), training=True))
        self.improve(self.maker, fooled)
        return {"fooled": fooled}


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
real = rng.normal(3.0, 0.5, size=(256, 1)).astype("float32")
noise = rng.normal(size=(256, 4)).astype("float32")
with unidist.DataParallel().scope():
    gan = Gan()
    gan.compile(maker=keras.optimizers.Adam(0.01), judge=keras.optimizers.Adam(0.01))
before = float(gan.maker.predict(noise, verbose=0).mean())
gan.fit((real, noise), batch_size=64, epochs=8, verbose=0)
after = float(gan.maker.predict(noise, verbose=0).mean())
if unidist.process_index() == 0:
    print(f"mean of what is made: before {before:.2f}, after {after:.2f}")
    print("nearer to 3:", abs(after - 3) < abs(before - 3))

"""One script on every backend: its name is an argument, nothing else changes.

    python examples/switching_backends.py sim
    python examples/switching_backends.py jax
    python examples/switching_backends.py tensorflow
    unidist run -n 4 examples/switching_backends.py torch
    unidist run -n 4 --backend horovod examples/switching_backends.py horovod

It prints, on each of them:

    4 devices, up/kernel is (16, 64), and (16, 32) on a device
    loss 0.146
"""

import sys

import unidist

unidist.use(sys.argv[1], devices=4)

import keras
import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 16)).astype("float32")
y = x[:, :4].sum(axis=1, keepdims=True) / 2

with unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2})).scope():
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(64, "gelu", name="up"),
            keras.layers.Dense(1, name="down"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
# Frameworks draw other first weights from one seed: these are the same on all of them.
for variable in model.trainable_variables:
    variable.assign(np.random.default_rng(len(variable.path)).normal(scale=0.1, size=variable.shape))
loss = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"][-1]

up = unidist.describe(model).rows[0]
if unidist.process_index() == 0:
    print(f"{len(unidist.list_devices())} devices, up/kernel is {up.shape}, and {up.local_shape} on a device")
    print(f"loss {loss:.3f}")

"""A model that does not fit on one device: with `zero=3` each device keeps a quarter of everything.

The limit here is small, so that the example is quick. The plan says before the training what fits.

    python examples/zero3.py
    unidist run -n 4 examples/zero3.py

It prints:

    a device may hold 6.0 MB
    zero=0: 16.8 MB, too much
    zero=1: 7.4 MB, too much
    zero=3: 4.2 MB, fits
    trained: the loss fell, and a device holds 3.2 MB of variables
"""

import unidist

unidist.use(devices=4)

import keras
import numpy as np

LIMIT = 6.0e6
WIDTH, DEPTH = 256, 16


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, "relu", name=f"layer{k}") for k in range(DEPTH)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(1, name="head")])


def held(zero: int) -> int:
    """Bytes of weights, gradients and Adam's slots on a device."""
    rows = unidist.plan(build(), unidist.Mesh({"data": 4}), zero=zero).rows
    return sum(row.bytes_per_device + row.gradient_bytes_per_device + row.slot_bytes_per_device for row in rows)


sizes = {zero: held(zero) for zero in (0, 1, 3)}
stage = next(zero for zero, size in sizes.items() if size < LIMIT)
with unidist.DataParallel(zero=stage).scope():
    model = build()
    model.compile(keras.optimizers.Adam(0.001), "mse")
x = np.random.default_rng(0).normal(size=(64, WIDTH)).astype("float32")
loss = model.fit(x, x[:, :1], batch_size=32, epochs=3, verbose=0).history["loss"]
if unidist.process_index() == 0:
    print(f"a device may hold {LIMIT / 1e6:.1f} MB")
    for zero, size in sizes.items():
        print(f"zero={zero}: {size / 1e6:.1f} MB, {'fits' if size < LIMIT else 'too much'}")
    described = unidist.describe(model)
    holds = described.bytes_of("weights") + described.bytes_of("slots")
    fell = "the loss fell" if loss[-1] < loss[0] else "the loss rose"
    print(f"trained: {fell}, and a device holds {holds / 1e6:.1f} MB of variables")

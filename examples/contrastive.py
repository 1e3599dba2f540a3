"""Contrastive learning: two views of a row shall be alike, and unlike the views of all other rows of the batch.

The loss looks at all rows of a batch. Each device computes its own rows, and unidist gives the loss those of all
devices. So the negatives are as many as on one device.

    python examples/contrastive.py
    unidist run -n 4 examples/contrastive.py

It prints:

    rows that find their own view: before ...%, after ...%
    better: True
"""

import unidist

unidist.use(devices=4)

import keras
import numpy as np
from keras import ops

ROWS, BATCH, WIDTH = 64, 32, 12


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                keras.layers.Dense(32, "relu"),
                keras.layers.Dense(8),
            ]
        )

    def call(self, views):
        return tuple(ops.normalize(self.encoder(view), axis=1) for view in views)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        first, second = y_pred  # of all rows of the batch, whichever device computed them
        logits = ops.matmul(first, ops.transpose(second)) / 0.2
        return ops.mean(keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(first)[0]), logits, True))


def views(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    meaning, noise = rng.normal(size=(ROWS, 4)), lambda: 2 * rng.normal(size=(ROWS, WIDTH - 4))
    return tuple(np.concatenate([meaning, noise()], 1).astype("float32") for _ in range(2))


def found(model: keras.Model) -> float:
    first, second = model.predict(views(seed=1), verbose=0)
    return float(np.mean((first @ second.T).argmax(1) == np.arange(ROWS)))


keras.utils.set_random_seed(0)
with unidist.DataParallel().scope():
    model = Contrastive()
    model.compile(keras.optimizers.Adam(0.03))
before = found(model)
model.fit(views(seed=0), batch_size=BATCH, epochs=15, verbose=0)
after = found(model)
if unidist.process_index() == 0:
    print(f"rows that find their own view: before {before:.0%}, after {after:.0%}")
    print("better:", after > before + 0.1)

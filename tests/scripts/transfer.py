"""Transfer learning: what an autoencoder has learned reads for a classifier, first as it is, then trained on."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

ROWS, BATCH, WIDTH, KINDS = 16, 8, 6, 3


def run(steps: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(10)
    x, y = rng.normal(size=(ROWS, WIDTH)).astype("float32"), rng.integers(0, KINDS, ROWS).astype("int32")
    encoder = keras.Sequential(
        [layers.Input((WIDTH,)), layers.Dense(16, "tanh", name="up"), layers.Dense(4, "tanh", name="code")],
        name="encoder",
    )
    decoder = keras.Sequential([layers.Input((4,)), layers.Dense(WIDTH, name="again")], name="decoder")
    shown = np.asarray(keras.ops.convert_to_numpy(decoder(encoder(x[:2]))))
    both = keras.Sequential([layers.Input((WIDTH,)), encoder, decoder], name="autoencoder")
    both.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    told = {"first": both.fit(x, x, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history["loss"]}

    encoder.trainable = False
    inputs = keras.Input((WIDTH,))
    kind = layers.Dense(KINDS, "softmax", name="kind")(encoder(inputs, training=False))
    classifier = keras.Model(inputs, kind, name="classifier")
    for part, rate in (("head", 0.01), ("whole", 0.005)):
        classifier.compile(keras.optimizers.SGD(rate, momentum=0.9), "sparse_categorical_crossentropy")
        told[part] = classifier.fit(x, y, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history["loss"]
        encoder.trainable = True
    told["back"] = both.fit(x, x, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history["loss"]
    return {"shown": shown, **told, "weights": [*classifier.get_weights(), *decoder.get_weights()]}

"""A vision transformer: a picture is cut into patches, which attend to each other."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

ROWS, BATCH, SIZE, PATCH, WIDTH, HEADS, KINDS = 20, 8, 8, 4, 8, 2, 3
COUNT = (SIZE // PATCH) ** 2


class Patches(layers.Layer):
    def call(self, pictures: Any) -> Any:
        shape = ops.shape(pictures)
        patches = keras.ops.image.extract_patches(pictures, size=PATCH)
        return ops.reshape(patches, (shape[0], COUNT, PATCH * PATCH * shape[3]))


class PatchEncoder(layers.Layer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.projection = layers.Dense(WIDTH, name="projection")
        self.position = layers.Embedding(COUNT, WIDTH, name="position")

    def call(self, patches: Any) -> Any:
        places = ops.expand_dims(ops.arange(0, COUNT, 1), axis=0)
        return self.projection(patches) + self.position(places)


def network(pictures: Any) -> Any:
    inputs = keras.Input((SIZE, SIZE, 2))
    light = layers.Normalization(name="light")
    light.adapt(pictures)
    x = PatchEncoder(name="patches")(Patches(name="cut")(light(inputs)))
    for k in range(1):
        normed = layers.LayerNormalization(epsilon=1e-6, name=f"before{k}")(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention{k}")(normed, normed)
        inner = layers.LayerNormalization(epsilon=1e-6, name=f"after{k}")(x)
        inner = layers.Dense(2 * WIDTH, keras.activations.gelu, name=f"up{k}")(inner)
        x = x + layers.Dense(WIDTH, keras.activations.gelu, name=f"down{k}")(inner)
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6, name="last")(x))
    x = layers.Dense(16, keras.activations.gelu, name="hidden")(x)
    return keras.Model(inputs, layers.Dense(KINDS, name="kind")(x), name="vit")


def run(steps: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(8)
    pictures = rng.uniform(0, 255, size=(ROWS, SIZE, SIZE, 2)).astype("float32")
    kind = rng.integers(0, KINDS, ROWS).astype("int32")
    model = network(pictures)
    model.compile(
        keras.optimizers.AdamW(0.005, weight_decay=0.01, epsilon=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
    )
    history = model.fit(
        pictures, kind, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0, validation_split=0.2
    ).history
    return {
        **history,
        "predict": model.predict(pictures, verbose=0),
        "weights": model.get_weights(),
    }

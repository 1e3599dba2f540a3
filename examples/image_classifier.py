"""An image classifier on four devices, data parallel: each device holds the model and takes a part of each batch.

    python examples/image_classifier.py                 # four virtual devices
    unidist run -n 4 examples/image_classifier.py       # four processes

It prints:

    4 devices
    accuracy before 0..., after 0.9...
"""

import unidist

unidist.use(devices=4)

import keras
import numpy as np


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise, with one quarter brighter: which one is the class."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(count, 16, 16, 1)).astype("float32")
    y = rng.integers(0, 4, count)
    for image, quarter in zip(x, y, strict=True):
        row, column = 8 * (quarter // 2), 8 * (quarter % 2)
        image[row : row + 8, column : column + 8] += 0.5
    return x, y


keras.utils.set_random_seed(0)
with unidist.DataParallel().scope():
    model = keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            keras.layers.Conv2D(8, 3, strides=2, padding="same"),
            keras.layers.BatchNormalization(),  # its statistics are those of the whole batch
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])

test = images(200, seed=1)
before = model.evaluate(*test, verbose=0)[1]
model.fit(*images(600, seed=0), batch_size=60, epochs=5, verbose=0)
after = model.evaluate(*test, verbose=0)[1]
if unidist.process_index() == 0:
    print(len(unidist.list_devices()), "devices")
    print(f"accuracy before {before:.2f}, after {after:.2f}")

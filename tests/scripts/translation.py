"""From sequence to sequence: an encoder's states begin a decoder, which then writes letter by letter."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

ROWS, BATCH, LETTERS, LENGTH, UNITS = 16, 8, 6, 4, 8


def run(steps: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    read, written, wanted = (np.eye(LETTERS, dtype="float32")[rng.integers(0, LETTERS, (ROWS, LENGTH))] for _ in "abc")
    reading = keras.Input((None, LETTERS))
    _, *states = layers.LSTM(UNITS, return_state=True, name="encoder")(reading)
    writing = keras.Input((None, LETTERS))
    decode = layers.LSTM(UNITS, return_sequences=True, return_state=True, name="decoder")
    outputs, _, _ = decode(writing, initial_state=states)
    spell = layers.Dense(LETTERS, "softmax", name="spell")
    model = keras.Model([reading, writing], spell(outputs), name="translation")
    model.compile(keras.optimizers.RMSprop(0.01, epsilon=1e-3), "categorical_crossentropy", metrics=["accuracy"])
    history = model.fit([read, written], wanted, batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history

    encoder = keras.Model(reading, states, name="reader")
    given = [keras.Input((UNITS,)), keras.Input((UNITS,))]
    outputs, *after = decode(writing, initial_state=given)
    decoder = keras.Model([writing, *given], [spell(outputs), *after], name="writer")
    letter, said = np.eye(LETTERS, dtype="float32")[[[0], [0]]], []
    held = encoder.predict(read[:2], verbose=0)
    for _ in range(LENGTH):
        chances, *held = decoder.predict([letter, *held], verbose=0)
        said.append(chances[:, 0])
        letter = np.eye(LETTERS, dtype="float32")[chances.argmax(-1)]
    return {**history, "said": said, "weights": model.get_weights()}

"""A small GPT from scratch on a mesh of 2 x 2: batches are cut over "data", the weights of its blocks over "model".

unidist finds the cuts: attention by heads, the feed-forward layers by columns and rows.

    python examples/gpt.py
    unidist run -n 4 examples/gpt.py

It prints:

    block0_up: column: its outputs stay cut, until an operation needs all of them
    ...% of the weights are cut
    the cat sat on the mat and the dog sat on the log
"""

import unidist

unidist.use(devices=4)

import keras
import numpy as np
from keras import layers, ops

TEXT = "the cat sat on the mat and the dog sat on the log. "
LETTERS = sorted(set(TEXT))
LENGTH, WIDTH, HEADS, BLOCKS = 16, 32, 4, 1


class Positions(layers.Layer):
    """Adds a vector that was learned for each place."""

    def build(self, shape):
        self.table = self.add_weight(shape=(LENGTH, shape[-1]), name="table")

    def call(self, x):
        return x + self.table


def gpt() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(len(LETTERS), WIDTH)(tokens))
    for k in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"block{k}_attention")(y, y, use_causal_mask=True)
        y = layers.Dense(4 * WIDTH, "gelu", name=f"block{k}_up")(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH, name=f"block{k}_down")(y)
    return keras.Model(tokens, layers.Dense(len(LETTERS), name="letters")(layers.LayerNormalization()(x)))


def continued(model: keras.Model, text: str, count: int) -> str:
    """The likeliest letters behind a text."""
    for _ in range(count):
        window = np.array([[LETTERS.index(letter) for letter in text[-LENGTH:]]])
        text += LETTERS[int(ops.argmax(model(window)[0, -1]))]
    return text


keras.utils.set_random_seed(0)
with unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2})).scope():
    model = gpt()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01), loss)

data = np.array([LETTERS.index(letter) for letter in TEXT * 3])
starts = np.arange(2 * len(TEXT))
x = np.stack([data[k : k + LENGTH] for k in starts])
y = np.stack([data[k + 1 : k + 1 + LENGTH] for k in starts])
model.fit(x, y, batch_size=34, epochs=30, verbose=0)

described = unidist.describe(model)
weights = [row for row in described.rows if row.kind == "weights"]
cut = sum(np.prod(row.shape) for row in weights if row.is_sharded)
poem = continued(model, TEXT[:LENGTH], 33)
if unidist.process_index() == 0:
    for k in range(BLOCKS):
        print(f"block{k}_up: {described.why[f'block{k}_up']}")
    print(f"{100 * cut / model.count_params():.0f}% of the weights are cut")
    print(poem)

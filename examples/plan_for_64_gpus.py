"""What a model of a billion parameters would hold and send on 64 GPUs, known on a laptop in some seconds.

Nothing is trained, and no weight is made.

    python examples/plan_for_64_gpus.py

It prints:

    1.1 billion parameters
    mesh                     zero   a device holds   a step sends
    {'data': 64}                0          17.1 GB         8.4 GB
    {'data': 64}                1           4.5 GB         8.4 GB
    {'data': 64}                3           0.3 GB        11.3 GB
    {'data': 8, 'model': 8}     1           0.7 GB        42.1 GB
"""

import keras
from keras import layers

import unidist

WIDTH, BLOCKS, HEADS, WORDS, LENGTH, BATCH = 4096, 4, 32, 32_000, 1024, 512
FLAT, SQUARE = {"data": 64}, {"data": 8, "model": 8}
WAYS = [(FLAT, 0), (FLAT, 1), (FLAT, 3), (SQUARE, 1)]


def language_model() -> keras.Model:
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(tokens)
    for k in range(BLOCKS):
        y = layers.LayerNormalization(name=f"norm{k}a")(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention{k}")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"norm{k}b")(x)
        y = layers.Dense(4 * WIDTH, "gelu", name=f"up{k}")(y)
        x = x + layers.Dense(WIDTH, name=f"down{k}")(y)
    return keras.Model(tokens, layers.Dense(WORDS, name="head")(x))


with keras.StatelessScope(initialize_variables=False):  # variables get no values
    model = language_model()
print(f"{model.count_params() / 1e9:.1f} billion parameters")
print(f"{'mesh':24} {'zero':>4}   a device holds   a step sends")
for sizes, zero in WAYS:
    plan = unidist.plan(model, unidist.Mesh(sizes), zero=zero, batch=BATCH, sequence=LENGTH)
    rows = plan.rows
    held = sum(row.bytes_per_device + row.gradient_bytes_per_device + row.slot_bytes_per_device for row in rows)
    print(f"{sizes!s:24} {zero:>4}   {held / 1e9:11.1f} GB   {plan.predicted.bytes() / 1e9:9.1f} GB")

"""A Llama of 16 layers reads texts of 8,192 tokens: four devices share each text, and keep a quarter of its memory.

Tokens are cut along the sequence; attention turns to heads for a while. No class is named and no rule is given.

    python examples/long_context.py
    python examples/long_context.py --length 1024
    unidist run -n 4 examples/long_context.py

It prints (8,192 tokens take some minutes on two cores):

    a device reads ... of ... tokens
    attention turns to heads by all_to_all
    the loss fell
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import unidist

unidist.use(devices=4)

import keras
import keras_hub
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--length", type=int, default=8192, help="tokens of a text")
length = parser.parse_args().length

keras.utils.set_random_seed(0)
mesh = unidist.Mesh({"context": 4})
with unidist.ModelParallel(mesh, remat="block").scope():
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=64,
        num_layers=16,
        num_query_heads=4,
        num_key_value_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
    )
    model = keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)

tokens = (np.arange(length + 1) % 64)[None]  # one text that counts up
x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((1, length), bool)}
with unidist.ledger() as sent:
    history = model.fit(x, tokens[:, 1:], batch_size=1, epochs=2, verbose=0).history["loss"]

if unidist.process_index() == 0:
    print(f"a device reads {length // 4} of {length} tokens")
    print("attention turns to heads by all_to_all" if sent.count("all_to_all") else sent.show())
    print("the loss fell" if history[-1] < history[0] else f"the loss rose: {history}")

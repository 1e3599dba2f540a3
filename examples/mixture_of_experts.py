"""A Mixtral whose experts four devices share out: each device computes its own, on the tokens that chose them.

No class is named and no rule is given: experts are kernels that a layer stacks.

    python examples/mixture_of_experts.py
    unidist run -n 4 examples/mixture_of_experts.py

It prints:

    a device holds 2 of 8 experts
    dispatch: each expert computes the rows that it has a weight for
    the loss fell
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import unidist

unidist.use(devices=4)

import keras
import keras_hub
import numpy as np

keras.utils.set_random_seed(0)
mesh = unidist.Mesh({"model": 4})
with unidist.ModelParallel(mesh, experts="dispatch").scope():
    backbone = keras_hub.models.MixtralBackbone(
        vocabulary_size=50,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
        num_experts=8,
        top_k=2,
    )
    model = keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)

rng = np.random.default_rng(0)
tokens = (rng.integers(0, 50, (48, 1)) + np.arange(17)) % 50  # texts that count up
x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((48, 16), bool)}
history = model.fit(x, tokens[:, 1:], batch_size=16, epochs=4, verbose=0).history["loss"]

held = unidist.describe(model)
if unidist.process_index() == 0:
    kernel = next(row for row in held.rows if "experts" in row.path)
    print(f"a device holds {kernel.local_shape[0]} of {kernel.shape[0]} experts")
    print(next(why for why in held.why.values() if why.startswith("dispatch")).partition(";")[0])
    print("the loss fell" if history[-1] < history[0] else f"the loss rose: {history}")

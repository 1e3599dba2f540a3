"""Fine-tuning a backbone of keras_hub with LoRA: the large kernels rest, two thin ones beside each are trained.

`GPT2Backbone.from_preset("gpt2_base_en")` in place of the small configuration brings a model with its weights.

    python examples/finetune_lora.py
    unidist run -n 4 examples/finetune_lora.py

It prints:

    trained: ... of ... parameters
    the loss fell
    a large kernel did not change
"""

import unidist

unidist.use(devices=4)

import keras
import keras_hub
import numpy as np

keras.utils.set_random_seed(0)
with unidist.DataParallel(zero=1).scope():  # each device keeps a part of Adam's slots
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=50, num_layers=2, num_heads=4, hidden_dim=32, intermediate_dim=64, max_sequence_length=16
    )
    backbone.enable_lora(rank=4)
    last = backbone.output[:, -1]
    model = keras.Model(backbone.input, keras.layers.Dense(2, name="counts_up_or_down")(last))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)

rng = np.random.default_rng(0)
starts, label = rng.integers(0, 50, (48, 1)), rng.integers(0, 2, 48)
tokens = (starts + np.arange(16) * (2 * label[:, None] - 1)) % 50  # texts that count up or down
x = {"token_ids": tokens, "padding_mask": np.ones((48, 16), bool)}


def kernel_of(path: str) -> np.ndarray:
    return next(value for name, value in unidist.gather_weights(model).items() if name.endswith(path))


before = kernel_of("query/kernel")
history = model.fit(x, label, batch_size=16, epochs=6, verbose=0).history["loss"]
after = kernel_of("query/kernel")
if unidist.process_index() == 0:
    trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    print(f"trained: {trained:,} of {model.count_params():,} parameters")
    print("the loss fell" if history[-1] < history[0] else f"the loss rose: {history}")
    print("a large kernel did not change" if np.array_equal(before, after) else "a large kernel changed")

"""A training loop of one's own: `train_on_batch`, with a learning rate that the loop itself lowers.

Each call of `train_on_batch` is a whole distributed step. In loops with `loss.backward()`, on torch, each process
computes by itself: docs/training.md says what is averaged then.

    python examples/training_loop.py
    unidist run -n 4 examples/training_loop.py

It prints:

    epoch 0: loss ..., learning rate 0.05
    ...
    epoch 7: loss ..., learning rate ...
    lowered ... time(s)
"""

import unidist

unidist.use(devices=4)

import keras
import numpy as np

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(120, 6)).astype("float32")
y = np.sin(x[:, :1] + x[:, 1:2])

with unidist.DataParallel().scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.05)
    model.compile(optimizer, "mse")

best, lowered = float("inf"), 0
for epoch in range(8):
    order = np.random.default_rng(epoch).permutation(len(x))  # the same on every process
    for start in range(0, len(x), 30):
        rows = order[start : start + 30]
        model.train_on_batch(x[rows], y[rows])
    loss = model.evaluate(x, y, batch_size=30, verbose=0)
    rate = float(optimizer.learning_rate)
    if unidist.process_index() == 0:
        print(f"epoch {epoch}: loss {loss:.3f}, learning rate {rate:.3g}")
    if loss > 0.9 * best:
        optimizer.learning_rate = rate / 2  # every process comes to the same loss, and so to the same rate
        lowered += 1
    best = min(best, loss)
if unidist.process_index() == 0:
    print("lowered", lowered, "time(s)")

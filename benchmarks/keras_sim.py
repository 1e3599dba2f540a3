"""Training an MLP 784-1024-1024-10 on 8 virtual ranks against one device, on the same total batch. Run by hand:

    python benchmarks/keras_sim.py [--rows 256]

Both in one process with one thread, Keras's `fit`, taking turns. By default 256 rows a rank, as in keras_torch.py; each
rank adds Keras's own time for a step and the traffic of one more replica, so fewer rows make a larger ratio.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import numpy as np

import unidist

RANKS = 8
unidist.use("sim", devices=RANKS)

import keras  # noqa: E402
import torch  # noqa: E402
from paired import report, seconds  # noqa: E402


def compiled() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(1024, activation="relu", name="up"),
            layers.Dense(1024, name="down"),
            layers.Activation("relu", name="relu"),
            layers.Dense(10, name="head"),
        ],
        name="mlp",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="rows of a rank (default: 256)")
    parser.add_argument("--steps", type=int, default=4, help="steps of one turn")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = RANKS * options.rows
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch * options.steps, 784)).astype("float32")
    y = rng.integers(0, 10, size=len(x)).astype("int32")
    rules = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
    mesh = unidist.Mesh({"data": 4, "model": 2})
    with unidist.DataParallel(unidist.Mesh({"data": 8})).scope():
        cut_rows = compiled()
    with unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules)).scope():
        cut_both = compiled()
    alone = compiled()
    models = {"8 ranks, data parallel": cut_rows, "4 x 2 ranks": cut_both, "one device": alone}
    candidates = {
        name: lambda model=model: model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        for name, model in models.items()
    }
    times = seconds(candidates, options.repetitions)
    bounds = {(name, "one device"): 1.5 for name in list(models)[:2]}
    report(f"Virtual ranks, {batch} rows in all", times, options.steps, bounds)


if __name__ == "__main__":
    main()

"""One device, one thread: a step of fit, against plain Keras and what one would write by hand.

    python benchmarks/whole_step.py [--rounds 25] [--steps 10]

The programs take turns, on an MLP of nine small layers and on one of 784-1024-1024-10, both with Adam.
Prints medians of paired ratios; absolute times depend on the machine.

    jit_compile=True    fit's own step under DataParallel
                        / plain Keras: the same model, its step as it is
                        / PyTorch by hand: nn.Module by torch.compile, torch.optim's fused Adam
    jit_compile=False   the same step as it is
                        / plain Keras
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import unidist

unidist.use("torch")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from mlp import crossentropy, fits_step, step_by_hand  # noqa: E402
from paired import Step, report, seconds  # noqa: E402
from torch import nn  # noqa: E402

SMALL, LARGE = (32, *[32] * 8, 10), (784, 1024, 1024, 10)
ROWS = {SMALL: 32, LARGE: 256}


def batch(sizes: Sequence[int], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(rows, sizes[0])).astype("float32"))
    return x, torch.tensor(rng.integers(0, sizes[-1], size=(rows,)))


def keras_model(sizes: Sequence[int], jit_compile: bool) -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(size, activation="relu") for size in sizes[1:-1]]
    model = keras.Sequential([keras.layers.Input((sizes[0],)), *hidden, keras.layers.Dense(sizes[-1])])
    model.compile(keras.optimizers.Adam(1e-3), loss=crossentropy(), jit_compile=jit_compile)
    return model


def ours(sizes: Sequence[int], x: torch.Tensor, y: torch.Tensor, jit_compile: bool) -> Step:
    with unidist.DataParallel().scope():
        return fits_step(keras_model(sizes, jit_compile), x, y)


def plain(sizes: Sequence[int], x: torch.Tensor, y: torch.Tensor) -> Step:
    model = keras_model(sizes, False)
    model.train_on_batch(x, y)
    function = model.train_function
    return lambda: function([(x, y)])


def by_hand(sizes: Sequence[int], x: torch.Tensor, y: torch.Tensor) -> Step:
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return step_by_hand(torch.compile(model), torch.optim.Adam(model.parameters(), 1e-3, fused=True), x, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for title, sizes in (("nine small layers", SMALL), ("784-1024-1024-10", LARGE)):
        given = batch(sizes, ROWS[sizes])
        candidates = {
            "program": ours(sizes, *given, jit_compile=True),
            "eager": ours(sizes, *given, jit_compile=False),
            "plain Keras": plain(sizes, *given),
            "hand": by_hand(sizes, *given),
        }
        times = seconds(candidates, arguments.rounds, steps=arguments.steps)
        aims = {("program", "plain Keras"): 0.5, ("program", "hand"): 1.0, ("eager", "plain Keras"): 0.95}
        report(title, times, arguments.steps, aims)


if __name__ == "__main__":
    main()

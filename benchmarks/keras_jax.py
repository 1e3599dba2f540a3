"""fit on JAX against a training step written by hand: what Keras and unidist cost on top of the compiled step.

An MLP 784-1024-1024-10, batches of 256, data parallel on four virtual CPU devices, both in this process, in turns.
Prints milliseconds a step and their ratio; the target is 1.05.

    python benchmarks/keras_jax.py [--steps 60] [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import unidist

DEVICES, BATCH, SIZES = 4, 256, (784, 1024, 1024, 10)
TARGET = 1.05


def by_hand(x: Any, y: Any) -> Callable[[int], None]:
    """A jit step with the gradients, SGD with momentum, and the batch placed as fit's is."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    rng = np.random.default_rng(0)
    weights = [
        (rng.normal(size=shape).astype("float32") * 0.03, np.zeros(shape[1], "float32"))
        for shape in itertools.pairwise(SIZES)
    ]

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for kernel, bias in weights[:-1]:
            x = jax.nn.relu(x @ kernel + bias)
        kernel, bias = weights[-1]
        logits = jax.nn.log_softmax(x @ kernel + bias)
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], 1))

    def step(weights: Any, speed: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        speed = jax.tree.map(lambda v, g: 0.9 * v - 0.01 * g, speed, gradients)
        return value, jax.tree.map(jnp.add, weights, speed), speed

    compiled = jax.jit(step, donate_argnums=(0, 1))
    state = jax.device_put([weights, jax.tree.map(np.zeros_like, weights)], whole)

    def run(steps: int) -> None:
        nonlocal state
        for k in range(steps):
            part = slice(k * BATCH, (k + 1) * BATCH)
            value, *state = compiled(*state, jax.device_put(x[part], rows), jax.device_put(y[part], rows))
        value.block_until_ready()

    return run


def by_fit(x: Any, y: Any) -> Callable[[int], None]:
    import keras

    with unidist.DataParallel().scope():
        model = keras.Sequential(
            [
                keras.Input((SIZES[0],)),
                *(keras.layers.Dense(size, "relu") for size in SIZES[1:-1]),
                keras.layers.Dense(SIZES[-1]),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)

    def run(steps: int) -> None:
        model.fit(x[: steps * BATCH], y[: steps * BATCH], batch_size=BATCH, shuffle=False, verbose=0)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    unidist.use("sim", devices=DEVICES)
    import numpy as np

    rng = np.random.default_rng(1)
    x = rng.normal(size=(options.steps * BATCH, SIZES[0])).astype("float32")
    y = rng.integers(0, SIZES[-1], len(x)).astype("int32")
    runs = {"by hand": by_hand(x, y), "fit": by_fit(x, y)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(3)
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(options.steps)
            times[name].append((time.perf_counter() - start) / options.steps * 1000)
    for name, found in times.items():
        print(f"{name:>8}: {statistics.median(found):7.2f} ms a step (min {min(found):.2f}, max {max(found):.2f})")
    ratio = statistics.median(f / h for f, h in zip(times["fit"], times["by hand"], strict=True))
    print(f"   ratio: {ratio:.3f} (median of rounds; target {TARGET})")


if __name__ == "__main__":
    main()

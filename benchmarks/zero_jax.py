"""Sharded states and values on JAX, four virtual CPU devices, against a step written by hand with shard_map.

    python benchmarks/zero_jax.py [--rounds 15] [--steps 4]

An MLP 784-1024-1024-1024-10, 256 rows, Adam; by hand the loss and its gradients are one shard_map, gradients go by
psum_scatter, and each device updates its part. Prints medians of paired ratios (absolute times depend on the machine),
and what a step of ours sends, in parts of the weights' bytes P: (n-1)/n is 0.75 here.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import unidist

DEVICES, ROWS, SIZES, RATE = 4, 256, (784, 1024, 1024, 1024, 10), 1e-3
AIM = 1.10

unidist.use("sim", devices=DEVICES)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from paired import Step, report, seconds  # noqa: E402


def batch() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(ROWS, SIZES[0])).astype("float32"), rng.integers(0, SIZES[-1], ROWS).astype("int32")


def ours(zero: int) -> tuple[Step, keras.Model]:
    x, y = batch()
    with unidist.DataParallel(zero=zero).scope():
        layers = [keras.layers.Dense(size, "relu") for size in SIZES[1:-1]]
        model = keras.Sequential([keras.Input((SIZES[0],)), *layers, keras.layers.Dense(SIZES[-1])])
        model.compile(keras.optimizers.Adam(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return lambda: model.train_on_batch(x, y), model


def _loss(weights: Any, x: Any, y: Any) -> Any:
    """The sum over these rows, in parts of the whole batch's mean."""
    for kernel, bias in weights[:-1]:
        x = jax.nn.relu(x @ kernel + bias)
    kernel, bias = weights[-1]
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ kernel + bias), y[:, None], 1).sum() / ROWS


def _spec(shape: tuple[int, ...]) -> PartitionSpec:
    """The first dim that divides over the devices; the last layer's bias has none."""
    dim = next((d for d, size in enumerate(shape) if size % DEVICES == 0), None)
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "data")


def by_hand(zero: int) -> Step:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    rng = np.random.default_rng(0)
    start = [
        (rng.normal(size=s).astype("float32") * 0.03, np.zeros(s[1], "float32")) for s in itertools.pairwise(SIZES)
    ]
    cuts = jax.tree.map(lambda w: _spec(w.shape), start)

    def gathered(weight: Any, cut: Any) -> Any:
        return weight if not cut else jax.lax.all_gather(weight, "data", axis=len(cut) - 1, tiled=True)

    def scattered(gradient: Any, cut: Any) -> Any:
        if not cut:
            return jax.lax.psum(gradient, "data")
        return jax.lax.psum_scatter(gradient, "data", scatter_dimension=len(cut) - 1, tiled=True)

    def local(held: Any, slots: Any, count: Any, x: Any, y: Any) -> Any:
        weights = jax.tree.map(gathered, held, cuts)
        loss, gradients = jax.value_and_grad(_loss)(weights, x, y)
        gradients = jax.tree.map(scattered, gradients, cuts)
        first = jax.tree.map(lambda m, g: m + (g - m) * 0.1, slots[0], gradients)
        second = jax.tree.map(lambda v, g: v + (g * g - v) * 0.001, slots[1], gradients)
        size = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        held = jax.tree.map(lambda w, m, v: w - size * m / (jnp.sqrt(v) + 1e-7), held, first, second)
        return jax.lax.psum(loss, "data"), held, (first, second)

    rows, whole = PartitionSpec("data"), PartitionSpec()
    takes, gives = (cuts, (cuts, cuts), whole, rows, rows), (whole, cuts, (cuts, cuts))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
    rests = jax.tree.map(lambda cut: NamedSharding(mesh, cut), cuts)
    at_rest = rests if zero == 3 else jax.tree.map(lambda cut: NamedSharding(mesh, whole), cuts)

    def step(held: Any, slots: Any, count: Any, x: Any, y: Any) -> Any:
        loss, held, slots = mapped(held, slots, count, x, y)
        return loss, jax.lax.with_sharding_constraint(held, at_rest), slots

    compiled = jax.jit(step, donate_argnums=(0, 1))
    zeros = jax.device_put(jax.tree.map(np.zeros_like, start), rests)
    state: list[Any] = [jax.device_put(start, at_rest), (zeros, jax.tree.map(jnp.copy, zeros)), np.float32(1)]
    x, y = batch()

    def run() -> None:
        placed = (jax.device_put(value, NamedSharding(mesh, rows)) for value in (x, y))
        loss, state[0], state[1] = compiled(*state, *placed)
        state[2] += np.float32(1)
        float(loss)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    for zero in (1, 3):
        step, model = ours(zero)
        times = seconds({"unidist": step, "by hand": by_hand(zero)}, options.rounds, steps=options.steps)
        report(f"stage {zero}", times, options.steps, {("unidist", "by hand"): AIM})
        with unidist.ledger() as book:
            step()
        whole = sum(variable.value.nbytes for variable in model.trainable_variables)
        for op in ("reduce_scatter", "all_gather", "all_reduce"):
            print(f"  {op:15s} {book.count(op):3d} of {book.bytes(op) / whole:.3f} P")


if __name__ == "__main__":
    main()

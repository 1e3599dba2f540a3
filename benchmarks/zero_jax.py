"""Sharded states and values on JAX, four virtual CPU devices, against a step written by hand with shard_map.

    python benchmarks/zero_jax.py [--rounds 9] [--steps 20]

An MLP 784-1024-1024-1024-10, 256 rows, Adam; by hand the loss and its gradients are one shard_map, gradients go by
psum_scatter, and each device updates its part. `fit` is paired with steps that are waited for at the end,
`train_on_batch` with steps whose losses are read one by one, and the program of a step alone with that by hand, on a
batch that is there. Prints medians of paired ratios (absolute times depend on the machine), and what a step of ours
sends, in parts of the weights' bytes P: (n-1)/n is 0.75 here.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import unidist

DEVICES, ROWS, SIZES, RATE = 4, 256, (784, 1024, 1024, 1024, 10), 1e-3
AIM = 1.00

unidist.use("sim", devices=DEVICES)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from paired import Step, report, seconds  # noqa: E402


def batches(count: int) -> tuple[Any, Any]:
    rng, rows = np.random.default_rng(1), ROWS * count
    return rng.normal(size=(rows, SIZES[0])).astype("float32"), rng.integers(0, SIZES[-1], rows).astype("int32")


def ours(strategy: unidist.DataParallel) -> keras.Model:
    """Trained for a step."""
    with strategy.scope():
        layers = [keras.layers.Dense(size, "relu") for size in SIZES[1:-1]]
        model = keras.Sequential([keras.Input((SIZES[0],)), *layers, keras.layers.Dense(SIZES[-1])])
        model.compile(keras.optimizers.Adam(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.train_on_batch(*batches(1))
    return model


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


def by_hand(zero: int) -> Any:
    """A step of a batch, which gives its loss."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    rng = np.random.default_rng(0)
    start = [
        (rng.normal(size=s).astype("float32") * 0.03, np.zeros(s[1], "float32")) for s in itertools.pairwise(SIZES)
    ]
    cuts = jax.tree.map(lambda w: _spec(w.shape), start)

    def gathered(weight: Any, cut: Any) -> Any:
        return weight if not cut else jax.lax.all_gather(weight, "data", axis=len(cut) - 1, tiled=True)

    def own(weight: Any, cut: Any) -> Any:
        if not cut:
            return weight
        size = weight.shape[len(cut) - 1] // DEVICES
        return jax.lax.dynamic_slice_in_dim(weight, jax.lax.axis_index("data") * size, size, len(cut) - 1)

    def scattered(gradient: Any, cut: Any) -> Any:
        if not cut:
            return jax.lax.psum(gradient, "data")
        return jax.lax.psum_scatter(gradient, "data", scatter_dimension=len(cut) - 1, tiled=True)

    def local(held: Any, slots: Any, count: Any, x: Any, y: Any) -> Any:
        weights = jax.tree.map(gathered, held, cuts) if zero == 3 else held
        held = held if zero == 3 else jax.tree.map(own, held, cuts)
        loss, gradients = jax.value_and_grad(_loss)(weights, x, y)
        gradients = jax.tree.map(scattered, gradients, cuts)
        first = jax.tree.map(lambda m, g: m + (g - m) * 0.1, slots[0], gradients)
        second = jax.tree.map(lambda v, g: v + (g * g - v) * 0.001, slots[1], gradients)
        size = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        held = jax.tree.map(lambda w, m, v: w - size * m / (jnp.sqrt(v) + 1e-7), held, first, second)
        return jax.lax.psum(loss, "data"), held, (first, second)

    rows, whole = PartitionSpec("data"), PartitionSpec()
    rest = cuts if zero == 3 else jax.tree.map(lambda cut: whole, cuts)
    takes, gives = (rest, (cuts, cuts), whole, rows, rows), (whole, cuts, (cuts, cuts))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
    rests, at_rest = (jax.tree.map(lambda cut: NamedSharding(mesh, cut), found) for found in (cuts, rest))

    def step(held: Any, slots: Any, count: Any, x: Any, y: Any) -> Any:
        loss, held, slots = mapped(held, slots, count, x, y)
        return loss, jax.lax.with_sharding_constraint(held, at_rest), slots

    compiled = jax.jit(step, donate_argnums=(0, 1))
    zeros = jax.device_put(jax.tree.map(np.zeros_like, start), rests)
    state: list[Any] = [jax.device_put(start, at_rest), (zeros, jax.tree.map(jnp.copy, zeros)), np.float32(1)]

    def run(x: Any, y: Any) -> Any:
        placed = (jax.device_put(value, NamedSharding(mesh, rows)) for value in (x, y))
        loss, state[0], state[1] = compiled(*state, *placed)
        state[2] += np.float32(1)
        return loss

    return run


def program(model: keras.Model, strategy: unidist.DataParallel) -> Any:
    """The compiled step alone, which gives its loss. The model keeps its own state."""
    parts = ("trainable", "non_trainable", "optimizer", "metrics")
    wanted = {f"{part}_variables": True for part in parts}
    state = [jax.tree.map(jnp.copy, model._get_jax_state(**wanted, purge_model_variables=False))]
    compiled = jax.jit(model.train_step, donate_argnums=0)

    def run(x: Any, y: Any) -> Any:
        with strategy.scope():
            logs, state[0] = compiled(state[0], (x, y))
        return logs["loss"]

    return run


def candidates(model: keras.Model, alone: Any, hand: Any, steps: int) -> dict[str, Step]:
    x, y = batches(steps)
    rows = NamedSharding(Mesh(np.array(jax.devices()[:DEVICES]), ("data",)), PartitionSpec("data"))
    placed = jax.device_put(batches(1), rows)
    parts = [(x[k : k + ROWS], y[k : k + ROWS]) for k in range(0, len(x), ROWS)]
    return {
        "fit": lambda: model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0),
        "by hand": lambda: [hand(*part) for part in parts][-1].block_until_ready(),
        "train_on_batch": lambda: [model.train_on_batch(*part) for part in parts],
        "by hand, losses read": lambda: [float(hand(*part)) for part in parts],
        "program": lambda: [alone(*placed).block_until_ready() for _ in parts],
        "program by hand": lambda: [hand(*placed).block_until_ready() for _ in parts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for zero in (1, 3):
        strategy = unidist.DataParallel(zero=zero)
        model, hand = ours(strategy), by_hand(zero)
        times = seconds(candidates(model, program(model, strategy), hand, options.steps), options.rounds)
        pairs = [("fit", "by hand"), ("train_on_batch", "by hand, losses read"), ("program", "program by hand")]
        report(f"stage {zero}", times, options.steps, dict.fromkeys(pairs, AIM))
        with unidist.ledger() as book:
            model.train_on_batch(*batches(1))
        whole = sum(variable.value.nbytes for variable in model.trainable_variables)
        for op in ("reduce_scatter", "all_gather", "all_reduce"):
            print(f"  {op:15s} {book.count(op):3d} of {book.bytes(op) / whole:.3f} P")


if __name__ == "__main__":
    main()

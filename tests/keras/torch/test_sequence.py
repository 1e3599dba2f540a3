"""Sequence parallelism: what treats places alone works on parts, what mixes them is given the whole; never a wrong
number."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import unidist
from unidist.algebra import Layout
from unidist.keras.records import model_record
from unidist.keras.torch import features
from unidist.keras.torch.layers import sequence
from unidist.keras.torch.world import rank_world

LENGTH, WIDTH = 7, 12  # on 2 devices 4 and 3 places, on 4 devices 2, 2, 2 and 1


class InPlace(layers.Layer):  # type: ignore[misc]
    """Writes into what it takes, and reads it by its other name."""

    def call(self, x):  # type: ignore[no-untyped-def]
        y = x * 1.0
        other = y
        y[:, 0] = 0.0
        y += 1.0
        other.mul_(2.0)
        return y + other


class Normed(layers.Layer):  # type: ignore[misc]
    """A gain of its own, used on parts and on what is whole, and in both at once."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")

    def call(self, x):  # type: ignore[no-untyped-def]
        pooled = ops.mean(x, axis=1, keepdims=True) * self.gain
        return x * (1.0 + self.gain) * self.gain + pooled + ops.sum(self.gain**2)


class Squeezes(layers.Layer):  # type: ignore[misc]
    """Each place scaled by what all places say, as in squeeze-and-excitation."""

    def call(self, x):  # type: ignore[no-untyped-def]
        return x * ops.sigmoid(ops.mean(x, axis=1, keepdims=True))


class Reshaped(layers.Layer):  # type: ignore[misc]
    """Takes its weights in a shape that is theirs, as layers do that may be given another one. Its tensors go through
    the order of their dims that they have."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")
        self.table = self.add_weight(shape=(2, shape[-1] // 2), initializer="ones", name="table")

    def call(self, x):  # type: ignore[no-untyped-def]
        gain = torch.reshape(ops.convert_to_tensor(self.gain), (x.shape[-1],))
        table = torch.reshape(ops.convert_to_tensor(self.table), (x.shape[-1],))
        return torch.permute(torch.permute(x, (0, 1, 2)) * gain, (0, 1, 2)) * table


TRAPS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "nothing": lambda: lambda x: x,
    "cumulative sum": lambda: lambda x: ops.cumsum(x, axis=1),
    "convolution": lambda: layers.Conv1D(WIDTH, 3, padding="causal"),
    "flip": lambda: lambda x: ops.flip(x, axis=1),
    "roll": lambda: lambda x: ops.roll(x, 1, axis=1),
    "softmax over places": lambda: layers.Softmax(axis=1),
    "norm over places": lambda: layers.LayerNormalization(axis=(1, 2)),
    "norm of batches": layers.BatchNormalization,
    "recurrent": lambda: layers.GRU(WIDTH, return_sequences=True),
    "largest place": lambda: lambda x: x - ops.max(x, axis=1, keepdims=True),
    "all numbers": lambda: lambda x: x / (1.0 + ops.std(x)),
    "transposed": lambda: lambda x: ops.transpose(ops.transpose(x, (0, 2, 1)) * 2.0, (0, 2, 1)),
    "first place": lambda: lambda x: x + x[:, :1],
    "another part of places": lambda: lambda x: ops.concatenate([x[:, 2:], x[:, :2]], axis=1),
    "places as features": lambda: (
        lambda x: ops.reshape(ops.reshape(x, (-1, LENGTH * WIDTH)) * 2.0, (-1, LENGTH, WIDTH))
    ),
    "sort": lambda: lambda x: ops.sort(x, axis=1),
    "in place": InPlace,
    "squeezed": Squeezes,
    "own weights": Normed,
    "reshaped weights": Reshaped,
    "penalty": lambda: layers.ActivityRegularization(l2=0.01),
    "replicated product": lambda: layers.Dense(WIDTH),
}


def build(trap: str) -> Callable[[], keras.Model]:
    def made() -> keras.Model:
        x = given = keras.Input((LENGTH, WIDTH))
        x = layers.LayerNormalization(rms_scaling=False)(x)
        for k in range(2):
            x = x + layers.Dense(WIDTH, name=f"down{k}")(layers.Dense(48, "gelu", name=f"up{k}")(x))
            x = TRAPS[trap]()(x)
            x = layers.RMSNormalization()(layers.Dropout(0.0)(x))
        return keras.Model(given, layers.Dense(3, name="head")(layers.GlobalAveragePooling1D()(x)))

    return made


def train(build: Callable[[], keras.Model], strategy: Any = None, **compiled: Any):  # type: ignore[no-untyped-def]
    keras.utils.set_random_seed(5)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = build()
        model.compile(keras.optimizers.AdamW(1e-2, epsilon=1e-3), "mse", **compiled)
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(10, LENGTH, WIDTH)).astype("float32"), rng.normal(size=(10, 3)).astype("float32")
    losses = model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False).history["loss"]
    return model, losses, [np.asarray(v) for v in model.weights]


def strategy(sizes: dict[str, int]) -> unidist.ModelParallel:
    return unidist.ModelParallel(unidist.Mesh(sizes), sequence_parallel=True)


ON_BOTH = ("norm of batches", "own weights", "penalty")
MESHES = {"4": {"model": 4}, "2x2": {"data": 2, "model": 2}}
CASES = [*((trap, "4") for trap in TRAPS), *((trap, "2x2") for trap in ON_BOTH)]


@pytest.mark.parametrize(("trap", "mesh"), CASES)
def test_a_layer_that_mixes_places_is_given_all_of_them(trap: str, mesh: str) -> None:
    _, losses, weights = train(build(trap))
    with unidist.ledger() as traffic:
        model, found, held = train(build(trap), strategy(MESHES[mesh]))
    np.testing.assert_allclose(found, losses, atol=1e-5, rtol=1e-5)
    for variable, a, b in zip(model.weights, held, weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=variable.path)
    assert sum(bool(rule.comes_cut) for rule in model_record.of(model).engine.rules) == 2
    sums = Counter(e.op for e in traffic.events if e.purpose.endswith(("down0", "down1")))
    # 10 rows in batches of 4 are three steps; a step scatters each sum once.
    assert sums["reduce_scatter"] == 2 * 2 * 3
    assert not sums["all_reduce"]


def test_weights_in_their_own_shape_are_summed_with_all_others() -> None:
    """Those in another one by themselves."""
    with unidist.ledger() as traffic:
        train(build("reshaped weights"), strategy({"model": 4}))
    sums = Counter((e.purpose, e.bytes) for e in traffic.events if e.op == "all_reduce")
    # A vector's bytes, by four ranks. Of each block: the bias behind the pair, the gain, the last norm's scale.
    once, steps = Fraction(2 * 3, 4) * 4 * WIDTH, 2 * 3
    assert sums["weights on parts of the sequence", 2 * 3 * once] == steps
    assert sums["", once] == 2 * steps


def test_a_sequence_shorter_than_the_devices_is_reduced_to_all() -> None:
    def short() -> keras.Model:
        x = given = keras.Input((LENGTH, WIDTH))
        x = layers.AveragePooling1D(3)(x)  # two places
        x = layers.Dense(WIDTH, name="down0")(layers.Dense(48, "gelu", name="up0")(x))
        return keras.Model(given, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))

    _, losses, _ = train(short)
    with unidist.ledger() as traffic:
        _, found, _ = train(short, strategy({"model": 4}))
    np.testing.assert_allclose(found, losses, atol=1e-5, rtol=1e-5)
    assert {e.op for e in traffic.events if e.purpose.endswith("down0")} == {"all_reduce"}


def test_dropout_draws_apart_for_each_part() -> None:
    world = rank_world(unidist.Mesh({"model": 4}), ())
    seeds = keras.random.SeedGenerator(3)
    # Each rank's thread draws the same next seed, and its place is added to it.
    state = seeds.state.numpy().copy()
    kept: dict[int, np.ndarray] = {}

    def on_rank(frame) -> None:  # type: ignore[no-untyped-def]
        x = torch.ones(4, 8, 64)
        part = sequence.cut(frame, x, tuple(x.shape), Layout(), ("model",))
        seeds.state.assign(state)
        y = keras.random.dropout(part, 0.5, seed=seeds)
        assert features.is_cut(y)
        assert tuple(y.local.shape) == (4, 2, 64)
        kept[frame.rank] = y.whole().numpy()

    world.run(on_rank)
    whole = kept[0]
    assert all((whole == other).all() for other in kept.values())
    assert set(np.unique(whole)) == {0.0, 2.0}
    parts = [whole[:, 2 * k : 2 * k + 2] for k in range(4)]
    assert all((a != b).any() for k, a in enumerate(parts) for b in parts[:k])


@pytest.mark.parametrize("together", [False, True])
def test_gradients_of_a_function_of_parts(together: bool) -> None:
    """What parts and whole tensors, of every way they broadcast, get as gradients."""
    world = rank_world(unidist.Mesh({"model": 4}), ())
    rng = np.random.default_rng(1)
    shapes = [(2, LENGTH, 5), (2, LENGTH, 5), (2, LENGTH, 1), (1, LENGTH, 5), (LENGTH, 5), (2, 1, 5), (5,), ()]
    values = [torch.as_tensor(rng.uniform(0.5, 1.5, s), dtype=torch.float64) for s in shapes]
    values.append(torch.as_tensor(rng.uniform(0.5, 1.5, (1, LENGTH, 5))))

    def compute(x: Any, *others: torch.Tensor) -> torch.Tensor:
        *plain, wide = others
        y = x * 2.0
        for other in (*plain, wide.expand(2, LENGTH, 5)):
            y = y * other + torch.nn.functional.layer_norm(y, (5,), plain[-2], None)
        with torch.no_grad():
            peak = torch.cumsum(y, 1).amax()  # gathered here first, without a gradient
        return torch.cumsum(y, 1) * y.mean(-1, keepdim=True) / peak

    weights = torch.as_tensor(rng.normal(size=(2, LENGTH, 5)))
    wanted_leaves = [v.clone().requires_grad_() for v in values]
    (compute(*wanted_leaves) * weights).sum().backward()
    seen = []

    def on_rank(frame) -> None:  # type: ignore[no-untyped-def]
        leaves = [v.clone().requires_grad_() for v in values]
        if together:
            frame.shared = sequence.SharedWeights(frame, [leaves[6]])
        part = sequence.cut(frame, leaves[0], shapes[0], Layout(), ("model",))
        (compute(part, *leaves[1:]) * weights).sum().backward()
        for leaf, wanted in zip(leaves, wanted_leaves, strict=True):
            torch.testing.assert_close(leaf.grad, wanted.grad)
        seen.append(frame.rank)

    world.run(on_rank)
    assert sorted(seen) == [0, 1, 2, 3]


def test_in_one_line() -> None:
    def made(parallel: bool) -> tuple[Any, list[float]]:
        keras.utils.set_random_seed(5)
        model = build("nothing")()
        if parallel:
            model = unidist.TensorParallelKeras(model, 4, distributed_backend="sim", sequence_parallel=True)
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse")
        x, y = np.ones((8, LENGTH, WIDTH), "float32"), np.ones((8, 3), "float32")
        return model, model.fit(x, y, epochs=3, verbose=0).history["loss"]

    _, wanted = made(False)
    with unidist.ledger() as traffic:
        model, losses = made(True)
    np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=1e-5)
    assert traffic.count("reduce_scatter") > 0
    assert model.get_parallelism_info()["sharded_fraction"] > 0.5


def test_places_of_images_are_parts_too() -> None:
    """Dim 1 of (batch, height, width, features) is cut as a sequence is."""

    def images() -> keras.Model:
        x = given = keras.Input((6, 5, 4))
        x = x + layers.Dense(4, name="down0")(layers.Dense(32, "gelu", name="up0")(x))
        x = layers.LayerNormalization()(x)
        x = layers.Conv2D(8, 3, padding="same")(x)
        return keras.Model(given, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))

    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(8, 6, 5, 4)).astype("float32"), rng.normal(size=(8, 3)).astype("float32")

    def losses(chosen: Any) -> list[float]:
        keras.utils.set_random_seed(5)
        model = images()
        if chosen is not None:
            unidist.parallelize(model, chosen)
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse")
        found: list[float] = model.fit(x, y, epochs=3, verbose=0, shuffle=False).history["loss"]
        return found

    with unidist.ledger() as traffic:
        found = losses(strategy({"model": 4}))
    np.testing.assert_allclose(found, losses(None), atol=1e-5, rtol=1e-5)
    assert [e.op for e in traffic.events if e.purpose.endswith("down0")].count("reduce_scatter") == 3


def test_what_is_computed_again_is_refused() -> None:
    with keras.RematScope(mode="full"):
        model = build("nothing")()
    with pytest.raises(unidist.CapabilityError, match=r"keras.RematScope\(mode='full'\).*outside of the scope"):
        unidist.parallelize(model, strategy({"model": 4}))
    assert not unidist.describe(model).sharded

"""Makes docs/pictures/*.svg: what unidist does, drawn by `unidist.draw`. Run by hand, after a change of what is drawn:

    python docs/pictures.py

`tests/drawing/test_documents.py` holds that the files are what this makes. The steps of `step_timeline` were measured
once (`docs/pictures/telemetry`): two processes on torch, which trained a model of four layers on one machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "pictures"
# The training of `ledger_bars` runs on virtual devices with Keras on torch.
os.environ.setdefault("KERAS_BACKEND", "torch")

import unidist  # noqa: E402
from unidist import Layout, Mesh, Picture, Plan, draw  # noqa: E402
from unidist.strategies import Strategy  # noqa: E402

DATA, BOTH = Mesh({"data": 4}), Mesh({"data": 2, "model": 2})


def one_rule() -> Picture:
    """The one rule at ZeRO 3: where a variable rests, where a layer needs it, where its gradient is reduced to."""
    three = Strategy(DATA, ("data",), zero=3).variable("up/kernel", (16, 24))
    return draw(three, mesh=DATA, shape=(16, 24), title="Three layouts of a variable (16, 24), zero 3")


def data_parallel_rows() -> Picture:
    """Data parallel: a batch of 10 rows over 4 devices is 3, 3, 3 and 1, and the weights are on all of them."""
    rows = unidist.algebra.Sharding(DATA, Layout("data"), (10, 8))
    weights = unidist.algebra.Sharding(DATA, Layout(), (8, 16))
    gradient = unidist.algebra.Sharding(DATA, Layout(partial="data"), (8, 16))
    found = {"a batch of 10 rows": rows, "a kernel": weights, "its gradient, before it is summed": gradient}
    return draw(found, title="Data parallel on four devices")


def column_then_row() -> Picture:
    """A pair: the first kernel is cut by its outputs, the second by its inputs, and one all_reduce ends it."""
    mesh = Mesh({"model": 4})
    found = {
        "up/kernel, by its outputs": (Layout(None, "model"), (12, 32)),
        "what is between stays cut": (Layout(None, "model"), (20, 32)),
        "down/kernel, by its inputs": (Layout("model"), (32, 12)),
        "down's products, to be summed": (Layout(partial="model"), (20, 12)),
        "down's outputs, behind an all_reduce": (Layout(), (20, 12)),
    }
    shardings = {name: unidist.algebra.Sharding(mesh, layout, shape) for name, (layout, shape) in found.items()}
    return draw(shardings, title="A pair of Dense layers on four devices")


def way_through_a_loss() -> Picture:
    """A tensor's way through a loss on two ranks: rows, a mean joined where it is used, summands, a gradient."""
    mesh = Mesh({"data": 2})
    found = {
        "x: each rank holds its rows": (Layout("data"), (6, 8)),
        "h = Dense(x): native, on own rows": (Layout("data"), (6, 12)),
        "mean(h, 0): each rank has a summand": (Layout(partial="data"), (1, 12)),
        "h - mean(h, 0): the mean is joined, h stays": (Layout("data"), (6, 12)),
        "the loss: a summand of the global mean": (Layout(partial="data"), (1, 4)),
        "the kernel's gradient: a summand": (Layout(partial="data"), (8, 12)),
        "behind the reducer": (Layout(), (8, 12)),
    }
    shardings = {name: unidist.algebra.Sharding(mesh, layout, shape) for name, (layout, shape) in found.items()}
    return draw(shardings, title="A tensor's way through a loss, on two ranks")


def mesh_2x2_batch_and_weights() -> Picture:
    """A mesh of 2 x 2: the batch is cut over "data", a kernel over "model", and replicas are named."""
    found = {
        "a batch": unidist.algebra.Sharding(BOTH, Layout("data"), (16, 12)),
        "a kernel": unidist.algebra.Sharding(BOTH, Layout(None, "model"), (12, 16)),
        "outputs": unidist.algebra.Sharding(BOTH, Layout("data", "model"), (16, 16)),
    }
    return draw(found, title="Batch and weights on data=2, model=2")


def uneven_rows() -> Picture:
    """Uneven rows: 6 rows over 4 devices are 2, 2, 2 and an empty shard."""
    return draw(Layout("data"), mesh=DATA, shape=(6, 8), title="6 rows over 4 devices")


def partial_sums() -> Picture:
    """A partial sum: the ranks of "model" hold summands of each block."""
    return draw(Layout("data", partial="model"), mesh=BOTH, shape=(6, 10), title="Rows cut, and partial over 'model'")


def all_gather() -> Picture:
    """all_gather: rows that are cut become whole on every rank."""
    return draw(Layout("data"), to=Layout(), mesh=DATA, shape=(8, 12))


def reduce_scatter() -> Picture:
    """reduce_scatter: summands become cut sums."""
    return draw(Layout(partial="data"), to=Layout("data"), mesh=DATA, shape=(8, 12))


def all_to_all() -> Picture:
    """all_to_all: rows that are cut become columns that are cut."""
    return draw(Layout("data"), to=Layout(None, "data"), mesh=DATA, shape=(8, 12))


def two_steps() -> Picture:
    """A redistribution of several steps on a mesh of 2 x 2."""
    return draw(Layout("data", partial="model"), to=Layout(None, ("model", "data")), mesh=BOTH, shape=(8, 12))


def plan_of_a_transformer() -> Picture:
    """The plan of a small transformer: what is cut how, its pairs, and what a training step sends."""
    return draw(_plan(_transformer(), {"data": 2, "model": 2}))


def plan_of_a_llama() -> Picture:
    """The plan of a Llama-like model: blocks that are alike are drawn once."""
    return draw(_plan(_llama(), {"data": 2, "model": 4}))


def zero_memory() -> Picture:
    """Memory of a device at the stages of ZeRO, on eight devices."""
    plans = {f"zero {zero}": _plan(_llama(), {"data": 8}, zero=zero) for zero in (0, 1, 2, 3)}
    return draw(plans, title="A Llama-like model on data=8: memory of a device")


def memory_over_meshes() -> Picture:
    """Memory of a device of a Llama-like model over meshes, with what a device has."""
    meshes = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}]
    plans = [_plan(_llama(), sizes) for sizes in meshes] + [_plan(_llama(), {"data": 4, "model": 2}, zero=3)]
    return draw(plans, device_memory=16e9, title="A Llama-like model on eight devices: memory of a device")


def ledger_bars() -> Picture:
    """What a training on data=2, model=2 sent, by collective and axis, and by purpose."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    with unidist.ModelParallel(BOTH).scope():
        layers = [keras.layers.Dense(64, activation="gelu", name="up"), keras.layers.Dense(16, name="down")]
        model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(1, name="head")])
        model.compile("adam", "mse")
    with unidist.ledger() as sent:
        model.fit(np.ones((96, 16), "float32"), np.ones((96, 1), "float32"), batch_size=32, verbose=0)
    return draw(sent)


def step_timeline() -> Picture:
    """Seconds of the steps of two processes, and the part of them spent waiting in collectives."""
    return draw(FOLDER / "telemetry")


def mesh_of_8() -> Picture:
    """The ranks of a mesh at their places."""
    return draw(Mesh({"data": 2, "model": 4}))


PICTURES: tuple[Callable[[], Picture], ...] = (
    one_rule,
    data_parallel_rows,
    column_then_row,
    way_through_a_loss,
    mesh_of_8,
    mesh_2x2_batch_and_weights,
    uneven_rows,
    partial_sums,
    all_gather,
    reduce_scatter,
    all_to_all,
    two_steps,
    ledger_bars,  # before the plans: what is trained next gives the variables of their models values
    plan_of_a_transformer,
    plan_of_a_llama,
    zero_memory,
    memory_over_meshes,
    step_timeline,
)


@dataclass(frozen=True)
class _Block:
    """What the blocks of a decoder are made of. `feedforward`: of what it takes, and its layers' common name."""

    name: str
    norm: Callable[..., Any]
    attention: Callable[..., Any]
    feedforward: Callable[[Any, str], Any]


def _decoder(name: str, words: int, width: int, count: int, block: _Block, use_bias: bool) -> Any:
    """A model without values, of `count` blocks that are alike."""
    import keras

    with keras.StatelessScope(initialize_variables=False):
        given = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(words, width, name="words")(given)
        for k in range(count):
            at = f"{block.name}_{k}"
            y = block.norm(name=f"{at}_norm")(x)
            x = x + block.attention(name=f"{at}_attention")(y, y)
            x = x + block.feedforward(block.norm(name=f"{at}_feedforward_norm")(x), at)
        scores = keras.layers.Dense(words, use_bias=use_bias, name="scores")(block.norm(name="norm")(x))
        return keras.Model(given, scores, name=name)


@lru_cache
def _transformer() -> Any:
    from keras import layers

    def feedforward(x: Any, at: str) -> Any:
        return layers.Dense(128, name=f"{at}_down")(layers.Dense(512, "gelu", name=f"{at}_up")(x))

    attention = partial(layers.MultiHeadAttention, 4, 32)
    return _decoder(
        "transformer", 2000, 128, 2, _Block("block", layers.LayerNormalization, attention, feedforward), True
    )


@lru_cache
def _llama() -> Any:
    from keras import layers

    def feedforward(x: Any, at: str) -> Any:
        gate = layers.Dense(14336, "silu", use_bias=False, name=f"{at}_gate")(x)
        up = layers.Dense(14336, use_bias=False, name=f"{at}_up")(x)
        return layers.Dense(4096, use_bias=False, name=f"{at}_down")(gate * up)

    attention = partial(layers.GroupQueryAttention, 128, 32, 8, use_bias=False)
    block = _Block("transformer_layer", layers.RMSNormalization, attention, feedforward)
    return _decoder("llama-like", 32000, 4096, 4, block, False)


def _plan(model: Any, sizes: dict[str, int], zero: int = 0) -> Plan:
    axes = {"data_axis": "data"} if "data" in sizes else {}
    return unidist.plan(model, Mesh(sizes), zero=zero, batch=8, sequence=2048, **axes)  # type: ignore[arg-type]


def made() -> dict[str, str]:
    """File name -> SVG."""
    unidist.use("sim", devices=4)
    return {f"{function.__name__}.svg": function().svg for function in PICTURES}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in made().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
        print(f"{name}: {len(svg):,} bytes")

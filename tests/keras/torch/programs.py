"""What runs in two processes for test_programs.py: models compiled by torch.compile against the same ones run as is."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any
from unittest import mock

import keras
import numpy as np
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import unidist
from tests.keras.torch.models import OwnOfPairs, compiling_by
from tests.keras.torch.whole import sent_in
from unidist.keras.patching.compat import TorchTrainer
from unidist.keras.records import model_record
from unidist.keras.torch.params import param_groups

RULES = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}


def perceptron() -> keras.Model:
    """With everything that a call leaves behind: random numbers, moving statistics, added losses."""
    x = given = keras.Input((6,))
    x = keras.layers.Dense(16, activation="relu", name="up")(x)
    x = keras.layers.Dropout(0.3, seed=3)(x)
    x = keras.layers.Dense(8, name="down")(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.Model(given, keras.layers.Dense(3, activity_regularizer="l2")(x))


class Positions(keras.layers.Layer):
    """Gives a view of its weight."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape[1:], name="table")

    def call(self, x: Any) -> Any:
        return keras.ops.broadcast_to(self.table, keras.ops.shape(x))


def encoder() -> keras.Model:
    """Tokens with a mask and positions, an attention and a feed-forward block, each with its residual."""
    given = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(11, 16, mask_zero=True)(given)
    x = x + Positions()(x)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, 4, name="attention")(x, x))
    h = keras.layers.Dense(32, activation="gelu", name="up")(x)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dense(16, name="down")(h))
    return keras.Model(given, keras.layers.Dense(3)(x))


MODELS = {"perceptron": perceptron, "encoder": encoder}
BATCH, EPOCHS = 8, 5
# With a ragged batch, or without one.
ROWS = {"perceptron": 11, "encoder": 8}


def train(name: str, strategy: Any, jit_compile: bool) -> tuple[list[Any], list[np.ndarray], Any]:
    """(losses of fit and evaluate, predictions and weights, model) of full and ragged batches."""
    keras.utils.set_random_seed(2)
    rng = np.random.default_rng(0)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = MODELS[name]()
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), loss="mse", jit_compile=jit_compile)
    rows = ROWS[name]
    x = rng.normal(size=(rows, 6)).astype("float32") if name == "perceptron" else rng.integers(0, 11, (rows, 6))
    y = rng.normal(size=(rows, *model.output_shape[1:])).astype("float32")
    losses = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history["loss"]
    values = [np.asarray(w) for w in model.weights]
    losses.append(model.evaluate(x, y, batch_size=BATCH, verbose=0))
    values.append(model.predict(x, batch_size=BATCH, verbose=0))
    return losses, values, model


def strategy_of(kind: str) -> Any:
    if kind in ("data", "shards"):
        return unidist.DataParallel(zero=2 if kind == "data" else 3)
    mesh = unidist.Mesh({"model": 2})
    rules = unidist.LayoutMap(mesh, RULES, strict=False)
    return unidist.ModelParallel(mesh, rules, sequence_parallel=kind == "sequence")


def compare(name: str, kind: str, compiler: str) -> tuple[dict[str, str], int, dict[str, int], dict[str, int]]:
    """Compiled against run as is. Gives why steps are none, how many programs there are, and what torch.compile
    counts: of graphs, and of breaks."""
    # What a layer gives is used when others are fetched, as in large models.
    with compiling_by(compiler), mock.patch.object(param_groups, "UNIT_BYTES", 1):
        with unidist.ledger() as plain:
            wanted = train(name, strategy_of(kind), False)
        counters.clear()
        with unidist.ledger() as traffic:
            found = train(name, strategy_of(kind), True)
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5, rtol=1e-5)
    for a, b in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    sent, wanted_sent = sent_in(traffic), sent_in(plain)
    assert sent == wanted_sent, (sent - wanted_sent, wanted_sent - sent)
    assert sent
    if kind == "sequence":
        assert any(op == "reduce_scatter" for op, *_ in sent)
    if kind in ("data", "shards"):
        assert any(not v._storage.is_kept for v in found[2].trainable_variables) == (kind == "shards")
    else:
        assert unidist.describe(found[2]).sharded
        assert any(rule.comes_cut for rule in model_record.of(found[2]).engine.rules)
    steps = model_record.of(found[2]).engine.whole_steps
    return dict(steps.why), steps.compiled, dict(counters["stats"]), dict(counters["graph_break"])


def held_at_once() -> tuple[int, int]:
    """(how often weights are gathered, how many are there at once) in a program of a step, of four equal layers of
    768 units stored as shards: a weight is there from the operation that gathers it to the last one that reads it."""
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=kept, inference_compiler=kept)
    compiling = mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend))
    keras.utils.set_random_seed(2)
    with compiling, mock.patch.object(param_groups, "UNIT_BYTES", 1):
        with strategy_of("shards").scope():
            layers = [keras.layers.Dense(768, activation="relu", dtype="mixed_bfloat16") for _ in range(4)]
            model = keras.Sequential([keras.Input((768,)), *layers, keras.layers.Dense(1)])
            # With larger steps so wide a model diverges, and what is not a number is not proven.
            model.compile(keras.optimizers.SGD(1e-5), "mse", jit_compile=True)
        x = np.ones((8, 768), "float32")
        for _ in range(4):
            model.train_on_batch(x, x[:, :1])
    assert model_record.of(model).engine.whole_steps.compiled == 1
    (graph,) = graphs
    nodes = list(graph.graph.nodes)
    place = {node: k for k, node in enumerate(nodes)}
    whole = [node for node in nodes if _gathers(node) and node.meta["val"].numel() >= 768 * 768]
    spans = [(place[node], max(place[user] for user in _readers(node))) for node in whole]
    return len(whole), max(sum(a <= k <= b for a, b in spans) for k in range(len(nodes)))


def _gathers(node: torch.fx.Node) -> bool:
    """Whether it is an exchange in which each place sends its part to all."""
    if "all_to_all" not in str(node.target):
        return False
    given = node.args[0]
    while isinstance(given, torch.fx.Node) and any(name in str(given.target) for name in ("view", "clone", "reshape")):
        given = given.args[0]
    return isinstance(given, torch.fx.Node) and "expand" in str(given.target)


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """All that reads a node's memory: users, and those of its views."""
    views = (
        "copy",
        "view",
        "permute",
        "transpose",
        "t.",
        "wait_tensor",
        "slice",
        "reshape",
        "expand",
        "alias",
        "squeeze",
    )
    found = list(node.users)
    for user in node.users:
        if any(name in str(user.target) for name in views):
            found += _readers(user)
    return found


class Reads(keras.layers.Layer):
    """Reads a variable that is another layer's."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(8, 8), name="own")
        self._read = lambda: layer.kernel

    def call(self, x):  # type: ignore[no-untyped-def]
        return keras.ops.matmul(x, self._read() + self.kernel)


def reading_anothers() -> tuple[Any, Any, dict[str, str]]:
    """(losses of a layer that reads another one's shards, in programs; as it is on one device; why it is none)."""

    def trained(strategy: Any) -> Any:
        keras.utils.set_random_seed(2)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            first = keras.layers.Dense(8)
            model = keras.Sequential([keras.Input((8,)), first, Reads(first)])
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=strategy is not None)
        x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
        return model.fit(x, x, batch_size=8, epochs=5, shuffle=False, verbose=0).history["loss"], model

    with compiling_by("aot_eager"):
        found, model = trained(strategy_of("shards"))
    return found, trained(None)[0], dict(model_record.of(model).engine.whole_steps.why)


def with_a_torch_module(kind: str, jit_compile: bool) -> tuple[Any, Any, list[str]]:
    """(losses of a model with a torch module in two processes, those of one device, what unidist warns of)."""

    def trained(strategy: Any) -> Any:
        keras.utils.set_random_seed(2)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
            module = keras.layers.TorchModuleWrapper(inner, name="inner")
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), module, keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=strategy is not None and jit_compile)
        x = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
        return model.fit(x, x[:, :3].copy(), batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]

    mesh = unidist.Mesh({"model": 2})
    strategies = {
        "data": unidist.DataParallel,
        "shards": lambda: unidist.DataParallel(zero=3),
        "found": lambda: unidist.ModelParallel(mesh),
        "ruled": lambda: unidist.ModelParallel(mesh, {"variable.*": ("model",)}),
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trained(strategies[kind]())
    return found, trained(None), [text for one in said if "eagerly" in (text := str(one.message))]


def start() -> None:
    unidist.use("torch")


def of_pairs_of_rows() -> tuple[Any, Any, list[str]]:
    """(losses and weights of a step of its own as a program in two processes, those of one device as is, what torch
    warns of in unidist)."""

    def trained(strategy: Any, jit_compile: bool) -> list[Any]:
        keras.utils.set_random_seed(2)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = OwnOfPairs([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.1), jit_compile=jit_compile)
        x = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
        found = model.fit(x, x[:, :3].copy(), batch_size=4, epochs=3, shuffle=False, verbose=0).history
        return [*(np.asarray(found[name]) for name in ("loss", "twice")), *map(np.asarray, model.weights)]

    with compiling_by("aot_eager"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = trained(unidist.DataParallel(), True)
    ours = [text for one in said if "unidist" in (text := str(one.message))]
    return found, trained(None, False), ours


class Bare(TorchTrainer, keras.layers.Layer):
    """A trainer that is no keras.Model, and has no `layers`."""

    def __init__(self) -> None:
        keras.layers.Layer.__init__(self)
        TorchTrainer.__init__(self)
        self.dense = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def of_a_layer_that_trains() -> tuple[Any, Any, int]:
    """(losses of programs in two processes, those of one device as is, how often values were sent)."""

    def trained(strategy: Any, jit_compile: bool) -> Any:
        keras.utils.set_random_seed(2)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = Bare()
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
        x = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
        return model.fit(x, x[:, :3].copy(), batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]

    with compiling_by("aot_eager"), unidist.ledger() as sent:
        found = trained(unidist.DataParallel(zero=3), True)
    return found, trained(None, False), sent.count("all_gather")

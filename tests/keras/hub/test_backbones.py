"""keras_hub's backbones under tensor parallelism: equal to one device, and every pair proven."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest

import unidist
from tests.keras.hub import zoo
from tests.support.sampling import unless_all
from unidist.keras.records import model_record

RANKS = [(name, ranks) for name in zoo.BY_HAND for ranks in (2, 4)]
# Two ranks and four in turn.
SOME = [(name, (2, 4)[k % 2]) for k, name in enumerate(zoo.BY_HAND)]


@pytest.mark.parametrize(("name", "ranks"), unless_all(SOME, RANKS))
def test_a_backbone_trains_as_on_one_device(name: str, ranks: int) -> None:
    wanted = zoo.alone(name)
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES[name], zoo.strategy(name, ranks))
    zoo.assert_equal(found, wanted)
    engine = model_record.of(found.model).engine
    rows = {rule.name for rule in engine.rules if rule.kind == "row"}
    taken = zoo.rows_of(found.model)
    # Keys and values of fewer heads than devices are cut by features: what attention gives is too, or in part.
    is_shared = ranks > 2 or name == "llama mqa"
    if name in (*zoo.GROUPED, "qwen3") and is_shared:
        assert taken >= {row for row in rows if "attention" not in row}
    else:
        assert taken == rows
    assert taken
    assert not any(rule.kind == "gather" for rule in engine.rules)
    assert any(e.op == "all_reduce" and e.purpose in rows for e in traffic.events)


def _steps_of(traffic: unidist.Ledger, part: str, steps: int) -> dict[str, float]:
    """Collective -> how many of them a step has in the layers whose path has this part."""
    count = Counter(e.op for e in traffic.events if part in e.purpose)
    return {op: n / steps for op, n in count.items()}


@pytest.mark.parametrize("name", ["bert", "llama gqa", "gpt-neox", "falcon", "bloom"])
def test_a_block_sends_two_all_reduces_forward_and_two_backward(name: str) -> None:
    """Query, key and value (gate and up) share one fan-out: one all_reduce of what flows back to their input."""
    with unidist.ledger() as traffic:
        zoo.train(zoo.BACKBONES[name], zoo.strategy(name, 2))
    assert _steps_of(traffic, "transformer_layer_1/", zoo.STEPS) == {"all_reduce": 4}


def test_shared_key_and_value_heads_are_joined_and_their_gradients_summed_in_one() -> None:
    with unidist.ledger() as traffic:
        zoo.train(zoo.BACKBONES["llama mqa"], unidist.ModelParallel(unidist.Mesh({"model": 4})))
    assert _steps_of(traffic, "transformer_layer_1/self_attention/key", zoo.STEPS) == {
        "all_gather": 1,
        "reduce_scatter": 1,
    }
    assert _steps_of(traffic, "transformer_layer_1/self_attention/attention_output", zoo.STEPS) == {"all_reduce": 1}


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_shared_keys_that_get_low_rank_kernels_later() -> None:
    """They are gathered from then on, and each rank's part of their gradients is summed all the same."""

    def train(strategy: unidist.ModelParallel | None) -> zoo.Trained:
        found = zoo.train(zoo.BACKBONES["llama mqa"], strategy, steps=1)
        keras.utils.set_random_seed(9)
        for layer in found.model._flatten_layers():
            if layer.name in ("key", "value"):
                layer.enable_lora(2)
        found.model.compile(keras.optimizers.SGD(0.1), loss="mse")
        y = np.random.default_rng(5).normal(size=(zoo.ROWS, 3)).astype("float32")
        losses = found.model.fit(zoo.inputs(found.model), y, epochs=3, shuffle=False, verbose=0).history["loss"]
        return zoo.Trained(found.model, losses, [np.asarray(v) for v in found.model.weights])

    mesh = unidist.Mesh({"model": 4})
    found = train(unidist.ModelParallel(mesh))
    zoo.assert_equal(found, train(None))
    assert len(zoo.rows_of(found.model)) == 4


ODD = {
    "three heads": lambda: zoo.M.BertBackbone(
        vocabulary_size=61, num_layers=1, num_heads=3, hidden_dim=12, intermediate_dim=18, dropout=0.0
    ),
    "three heads, grouped": lambda: zoo.M.LlamaBackbone(
        vocabulary_size=61, num_layers=1, num_query_heads=3, num_key_value_heads=1, hidden_dim=12, intermediate_dim=18
    ),
    "three key heads": lambda: zoo.M.GemmaBackbone(
        vocabulary_size=61, num_layers=1, num_query_heads=12, num_key_value_heads=3, hidden_dim=12,
        intermediate_dim=36, head_dim=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_does_not_divide_is_cut_unevenly_and_equal(name: str) -> None:
    kind = "gemma" if "key" in name else "bert"
    found = zoo.train(ODD[name], zoo.strategy(kind, 4))
    zoo.assert_equal(found, zoo.train(ODD[name]))
    sizes = {row.path: row.local_shape for row in unidist.describe(found.model).sharded}
    assert sizes["token_embedding/embeddings"] == (16, 12)


def test_a_map_written_by_hand_refuses_what_does_not_divide() -> None:
    with pytest.raises(unidist.LayoutError, match="does not divide"):
        zoo.train(ODD["three heads"], zoo.strategy("bert", 4, uneven=False))


def test_dropout_in_a_layer_for_shards_and_wholes() -> None:
    """Bloom calls one dropout layer on its heads, where ranks draw apart, and on its output, where they draw alike."""

    def build() -> keras.Model:
        return zoo.M.BloomBackbone(
            vocabulary_size=64, num_layers=1, num_heads=4, hidden_dim=16, intermediate_dim=32, dropout=0.1
        )

    found = zoo.train(build, zoo.strategy("bloom", 2))
    assert any("self_attention" in row for row in zoo.rows_of(found.model))
    for variable in found.model.weights:
        if not variable._storage.is_sharded:
            first, *others = variable._storage.shards.values()
            assert all(np.array_equal(first.detach(), other.detach()) for other in others), variable.path


class Tied(keras.Model):
    """A vocabulary-sharded table that also makes the logits; `reads` lets another layer read it as well."""

    def __init__(self, tied: bool, reads: bool) -> None:
        super().__init__()
        self.embedding = keras.layers.ReversibleEmbedding(61, 8, tie_weights=tied, logit_soft_cap=3.0, mask_zero=True)
        self.reads = reads

    def build(self, shape: tuple[int, ...]) -> None:
        self.embedding.build(shape)

    def call(self, x):  # type: ignore[no-untyped-def]
        h = self.embedding(x)
        if self.reads:
            h = h + keras.ops.mean(self.embedding.embeddings, axis=0)
        return self.embedding(h, reverse=True)


@pytest.mark.parametrize("dim", [0, 1], ids=["vocabulary", "features"])
@pytest.mark.parametrize(("tied", "reads"), [(True, False), (False, False), (True, True)])
def test_a_table_used_in_reverse(tied: bool, reads: bool, dim: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 61, (4, 5)), rng.integers(0, 61, (4, 5))

    def train(strategy: unidist.ModelParallel | None) -> zoo.Trained:
        import contextlib

        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = Tied(tied, reads)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.5), loss=loss)
            history = model.fit(x, y, batch_size=4, epochs=3, verbose=0)
        return zoo.Trained(model, history.history["loss"], [np.asarray(v) for v in model.weights])

    mesh = unidist.Mesh({"model": 4})
    layout = ("model", None) if dim == 0 else (None, "model")
    rules = unidist.LayoutMap(mesh, {".*/embeddings": layout}, uneven=True)
    with unidist.ledger() as traffic:
        found = train(unidist.ModelParallel(mesh, rules))
    zoo.assert_equal(found, train(None))
    assert traffic.events

"""keras_hub's backbones with sequence parallelism: equal to one device, in parts between the layers, and as many bytes
as all_reduces would send."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import keras
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import unidist
from tests.keras.hub import zoo
from tests.support.saving import saved_bytes
from unidist.keras.records import model_record

# LENGTH is 6: on 4 devices its parts are 2, 2, 2 and 0 places.
CASES = [
    *((name, 2) for name in ("bert", "llama mqa", "gpt2", "t5", "vit", "bart", "bloom")),
    *((name, 4) for name in ("llama gqa", "falcon")),
]


def strategy(sizes: dict[str, int], **more: int) -> unidist.ModelParallel:
    return unidist.ModelParallel(zoo.mesh(sizes), sequence_parallel=True, **more)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_backbone_trains_as_on_one_device(name: str, ranks: int) -> None:
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES[name], strategy({"model": ranks}))
    zoo.assert_equal(found, zoo.alone(name))
    assert unidist.describe(found.model).sharded
    rows = zoo.rows_of(found.model)
    assert rows
    # Every row layer's sum is scattered, none is reduced to all.
    sums = Counter((e.op, e.purpose) for e in traffic.events if e.purpose in rows)
    assert {op for op, _ in sums} == {"reduce_scatter", "all_gather"}
    assert {row for op, row in sums if op == "reduce_scatter"} == set(rows)


@pytest.mark.parametrize(("name", "ranks"), [("bert", 2), ("llama gqa", 4)])
def test_a_block_sends_the_halves_of_its_all_reduces(name: str, ranks: int) -> None:
    """Two all_reduces forward and two backward of a block are four reduce_scatters and four all_gathers, of the same
    bytes: (n - 1) / n of the activations each."""
    sent = {}
    for in_parts in (False, True):
        mesh = zoo.mesh({"model": ranks})
        with unidist.ledger() as traffic:
            zoo.train(zoo.BACKBONES[name], unidist.ModelParallel(mesh, sequence_parallel=in_parts))
        blocks = [e for e in traffic.events if e.purpose.startswith("transformer_layer_")]
        # Keys and values of fewer heads than devices are computed whole: theirs are no part of the two.
        blocks = [e for e in blocks if not e.purpose.endswith(("/key", "/value"))]
        sent[in_parts] = Counter(e.op for e in blocks), sum(e.bytes for e in blocks), {e.bytes for e in blocks}
    steps, layers = zoo.STEPS, 2
    activations = zoo.ROWS * zoo.LENGTH * zoo._SIZES["hidden_dim"] * 4
    half = Fraction((ranks - 1) * activations, ranks)
    assert sent[False] == (Counter(all_reduce=4 * layers * steps), 8 * layers * steps * half, {2 * half})
    halves = Counter(reduce_scatter=4 * layers * steps, all_gather=4 * layers * steps)
    assert sent[True] == (halves, 8 * layers * steps * half, {half})


def test_weights_on_parts_are_summed_by_one_all_reduce() -> None:
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES["llama gqa"], strategy({"model": 2}))
    norms = [v for v in found.model.trainable_variables if v.path.endswith("/scale")]
    sums = [e for e in traffic.events if e.purpose == "weights on parts of the sequence"]
    # Two norms of each of two blocks, and the last one; over 2 devices an all_reduce sends as much as it sums. The head
    # behind it multiplies each rank's sum over its places.
    assert len(norms) == 5
    assert [(e.op, e.bytes) for e in sums] == [("all_reduce", (5 * 16 + 16 * 3) * 4)] * zoo.STEPS


class Shapes(TorchDispatchMode):
    """Notes the shapes of what some of torch's kernels take."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self.kernel in str(func):
            self.seen.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "kernel", "count"), [("bert", "native_layer_norm", 5), ("llama gqa", "rsqrt", 5)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_norms_see_a_part_of_the_sequence(name: str, kernel: str, count: int, ranks: int) -> None:
    model = zoo.train(zoo.BACKBONES[name], strategy({"model": ranks}), steps=1).model
    x = {key: torch.as_tensor(value) for key, value in zoo.inputs(model).items()}

    def forward(frame) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
        with Shapes(kernel) as noted:
            model(x, training=True)
        return tuple(shape[1] for shape in noted.seen)

    # The first rank's part, torch.chunk's.
    assert model_record.of(model).engine.world.run(forward) == (-(-zoo.LENGTH // ranks),) * count


def test_layouts_are_planned_alike() -> None:
    model = zoo.BACKBONES["bert"]()
    mesh = zoo.mesh({"model": 2})
    plain, plan = (
        unidist.plan(model, mesh, sequence=zoo.LENGTH, sequence_parallel=in_parts) for in_parts in (False, True)
    )
    assert plan.layout_map.to_json() == plain.layout_map.to_json()
    assert plan.predicted.count("reduce_scatter") >= 8
    assert not plain.predicted.count("reduce_scatter")


@pytest.mark.parametrize("zero", [0, 3])
def test_data_and_model_axes_and_zero(zero: int) -> None:
    found = zoo.train(zoo.BACKBONES["bert"], strategy({"data": 2, "model": 2}, zero=zero))
    zoo.assert_equal(found, zoo.alone("bert"))
    x = zoo.inputs(found.model)
    torch.testing.assert_close(found.model.predict(x, verbose=0), zoo.alone("bert").model.predict(x, verbose=0))


def test_what_backward_keeps_of_the_activations_is_less() -> None:
    kept = {}
    for in_parts in (False, True):
        chosen = unidist.ModelParallel(unidist.Mesh({"model": 4}), sequence_parallel=in_parts)
        wide = {**zoo._ABSOLUTE, "max_sequence_length": 64}
        model = zoo.train(lambda wide=wide: zoo.M.BertBackbone(**wide), chosen, steps=1).model
        x = {key: torch.as_tensor(value).repeat(1, 8) for key, value in zoo.inputs(model).items()}
        kept[in_parts] = kept_bytes(model, x)
    # Inputs of column layers are kept whole, and what is inside of pairs is cut either way.
    assert kept[True] < 0.75 * kept[False]


def kept_bytes(model: keras.Model, x: dict[str, torch.Tensor]) -> int:
    """Bytes that the first rank's forward pass keeps for backward, weights left out."""
    engine = model_record.of(model).engine
    weights = [v._storage.leaf(0) for v in model.variables]

    def forward(frame) -> int:  # type: ignore[no-untyped-def]
        out, saved = saved_bytes(lambda: model(x, training=True), weights)
        assert out.requires_grad
        return saved

    return engine.world.run(forward)  # type: ignore[no-any-return]

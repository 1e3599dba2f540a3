"""Kernels of experts, which keras_hub's mixtures and a user's own layer stack: each device computes with its own."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import unidist
from tests.keras.gated import EXPERTS, WIDTH, weighed
from tests.keras.hub import zoo
from tests.support.sampling import unless_all
from unidist.keras.torch.layers import outputs

MIXTURES = ["mixtral", "qwen3-moe", "gpt-oss"]
EVERY = [(name, n) for name in MIXTURES for n in (2, 4)]
LAYERS, HIDDEN = 2, 16


@pytest.mark.parametrize(("name", "ranks"), unless_all([EVERY[1], EVERY[2], EVERY[4]], EVERY))
def test_each_device_computes_with_its_own_experts(name: str, ranks: int) -> None:
    found, traffic = zoo.planned(name, ranks, zoo.STEPS)
    zoo.assert_equal(found, zoo.alone(name))
    stacks = [row for row in unidist.describe(found.model).rows if row.kind == "weights" and "/experts/" in row.path]
    kernels = [row for row in stacks if len(row.shape) == 3]
    assert len(kernels) in (2 * LAYERS, 3 * LAYERS)
    assert {row.local_shape[0] for row in stacks} == {EXPERTS // ranks}, "biases too"
    assert unidist.plan(found.model, zoo.mesh({"model": ranks})).sharded_fraction > 0.9
    # Of a kernel nothing is sent: less is gathered in all steps than one kernel has bytes.
    of_experts = [e for e in traffic.events if "expert" in e.purpose]
    gathered = sum(e.bytes for e in of_experts if e.op == "all_gather")
    assert gathered < min(np.prod(row.shape) * 4 for row in kernels) / 2
    # The sum over experts is joined once, and so is the gradient of what they take.
    tokens = zoo.ROWS * zoo.LENGTH * zoo._SIZES["hidden_dim"] * 4
    sums = Counter(e.bytes for e in of_experts if e.op == "all_reduce")
    assert sums == {2 * tokens * Fraction(ranks - 1, ranks): 2 * LAYERS * zoo.STEPS}
    assert all(text.endswith("each operation by its rule") for path, text in why(found.model).items() if "exp" in path)


def why(model: Any) -> dict[str, str]:
    return dict(unidist.describe(model).why)


@pytest.mark.parametrize(
    ("name", "sizes"), [("mixtral", {"data": 2, "model": 2}), ("gpt-oss", {"context": 2, "model": 2})], ids=str
)
def test_beside_other_axes(name: str, sizes: dict[str, int]) -> None:
    zero = 3 if "data" in sizes and name == "mixtral" else 0
    found = zoo.train(zoo.BACKBONES[name], unidist.ModelParallel(zoo.mesh(sizes), zero=zero))
    zoo.assert_equal(found, zoo.alone(name))
    assert "stack: " in "".join(why(found.model).values())


class Mixture(keras.layers.Layer):
    """A user's own: gate, kernels and their sum in one call, and a gate that leaves out what is below zero."""

    def build(self, shape: Any) -> None:
        self.gate = self.add_weight(shape=(shape[-1], EXPERTS), name="gate")
        self.up = self.add_weight(shape=(EXPERTS, shape[-1], HIDDEN), name="up")
        self.low = self.add_weight(shape=(EXPERTS, HIDDEN), name="low", initializer="ones")
        self.down = self.add_weight(shape=(EXPERTS, HIDDEN, shape[-1]), name="down")

    def call(self, x: Any) -> Any:
        weight = ops.relu(ops.matmul(x, self.gate))
        hidden = ops.gelu(ops.einsum("bd,edh->ebh", x, self.up) + self.low[:, None])
        self.add_loss(ops.mean(weight) ** 2)
        return ops.einsum("be,ebd->bd", weight, ops.einsum("ebh,ehd->ebd", hidden, self.down))


def trained(strategy: Any, steps: int = 3) -> tuple[Any, list[np.ndarray]]:
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x = keras.Input((WIDTH,))
    model = keras.Model(x, keras.layers.Dense(2, name="head")(x + Mixture(name="mixture")(x)))
    if strategy is not None:
        model = unidist.parallelize(model, strategy)
    model.compile(keras.optimizers.AdamW(0.01, epsilon=1e-3), "mse")
    given = rng.normal(size=(6, WIDTH)).astype("float32"), rng.normal(size=(6, 2)).astype("float32")
    with zoo.quietly():
        model.fit(*given, batch_size=6, epochs=steps, shuffle=False, verbose=0)
    return model, [np.asarray(v) for v in model.weights]


@pytest.mark.parametrize("sizes", [{"model": 2}, {"model": 4}, {"data": 2, "model": 2}], ids=str)
def test_a_layer_of_the_users_own(sizes: dict[str, int]) -> None:
    _, wanted = trained(None)
    strategy = unidist.ModelParallel(zoo.mesh(sizes))
    with unidist.ledger() as traffic:
        model, found = trained(strategy)
    for variable, a, b in zip(model.weights, found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0, err_msg=variable.path)
    layouts = {row.path: str(row.layout) for row in unidist.describe(model).rows if "mixture" in row.path}
    cut = "Layout('model')"
    assert layouts["mixture/up"] == layouts["mixture/low"] == layouts["mixture/down"] == cut
    kernel = EXPERTS * WIDTH * HIDDEN * 4 // 2
    of_step = [e for e in traffic.events if e.axes == ("model",)]
    assert all(e.bytes < kernel for e in of_step if e.op == "all_gather")
    assert any(e.op == "all_reduce" for e in of_step)


@pytest.mark.parametrize(("cuts", "words"), [((None, "model"), "gathered"), (("model",), "stack: ")])
def test_layouts_by_hand(cuts: tuple[Any, ...], words: str) -> None:
    """Kernels that are cut along another dim are gathered for the call."""
    mesh = zoo.mesh({"model": 2})
    rules = unidist.LayoutMap(mesh, {"mixture/(up|down)": cuts})
    _, wanted = trained(None)
    model, found = trained(unidist.ModelParallel(mesh, rules))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
    assert words in why(model)["mixture"]


def test_experts_that_do_not_divide_are_gathered() -> None:
    plan = unidist.plan(zoo.BACKBONES["mixtral"](num_experts=3), zoo.mesh({"model": 2}))
    kernels = [row for row in plan.rows if "/experts/" in row.path]
    assert {row.layout for row in kernels} == {unidist.Layout(None, "model")}
    assert {row.reason for row in kernels} == {"gathered: for each call of its layer"}


class Rows:
    """Counts the rows that kernels compute: of sums with weights, and where all are computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all, self.summed, self.given = 0, 0, 0
        every, some = outputs.Bank.all, outputs.Bank.summed

        def counting_all(bank: outputs.Bank) -> Any:
            self.all += len(bank.rows)
            return every(bank)

        def counting_sums(bank: outputs.Bank, weights: Any) -> Any:
            self.given += weights.numel()
            self.summed += int((weights != 0).sum())
            return some(bank, weights)

        monkeypatch.setattr(outputs.Bank, "all", counting_all)
        monkeypatch.setattr(outputs.Bank, "summed", counting_sums)


SENT: list[dict[str, int]] = [{"data": 2, "expert": 2}, {"expert": 2, "model": 2}, {"expert": 2, "context": 2}]
GRIDS: list[dict[str, int]] = [{"model": 2}, {"data": 2, "model": 2}, {"context": 2, "model": 2}, *SENT]
OF_GRIDS = [(name, sizes) for name in MIXTURES for sizes in GRIDS]
SOME = [OF_GRIDS[k] for k in (0, 3, 8, 10, 13, 17)]


@pytest.mark.parametrize(("name", "sizes"), unless_all(SOME, OF_GRIDS), ids=str)
def test_dispatched_experts_compute_their_own_rows(
    name: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(monkeypatch)
    found = zoo.train(zoo.BACKBONES[name], unidist.ModelParallel(zoo.mesh(sizes), experts="dispatch"))
    zoo.assert_equal(found, zoo.alone(name))
    assert rows.all == 0
    # Two of four experts have a weight for a token.
    assert rows.given == 2 * rows.summed > 0
    said = "".join(why(found.model).values())
    assert "dispatch: each expert computes the rows that it has a weight for" in said
    assert ("which are sent to its device" in said) is ("expert" in sizes)
    assert all(row.local_shape[0] == EXPERTS // 2 for row in unidist.describe(found.model).rows if is_kernel(row))


def is_kernel(row: Any) -> bool:
    return row.kind == "weights" and "/experts/" in row.path


def test_an_axis_of_experts_cuts_nothing_else() -> None:
    """Where it cuts no batch either, its devices compute alike but with experts; layers are cut over the model axis."""
    strategy = unidist.ModelParallel(zoo.mesh({"data": 2, "expert": 2}), data_axis="data")
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES["mixtral"], strategy)
    zoo.assert_equal(found, zoo.alone("mixtral"))
    cut = [row for row in unidist.describe(found.model).rows if row.kind == "weights" and row.is_sharded]
    assert all(map(is_kernel, cut))
    gathered = [e.bytes for e in traffic.events if e.axes == ("expert",) and e.op == "all_gather"]
    assert max(gathered) < min(row.bytes_per_device for row in cut) / 2
    plan = unidist.plan(found.model, zoo.mesh({"expert": 2, "model": 2}))
    over = {row.path: row.layout for row in plan.rows if row.is_sharded}
    assert {layout.sharded_axes for path, layout in over.items() if "/experts/" in path} == {("expert",)}
    assert {layout.sharded_axes for path, layout in over.items() if "/experts/" not in path} == {("model",)}


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_without_dispatch_kernels_are_gathered_as_planned(name: str) -> None:
    grid = zoo.mesh({"data": 2, "expert": 2})
    with unidist.ledger() as traffic:
        found = zoo.train(zoo.BACKBONES[name], unidist.ModelParallel(grid))
    zoo.assert_equal(found, zoo.alone(name))
    assert "with experts='dispatch' rows are sent to them" in "".join(why(found.model).values())
    planned = unidist.plan(found.model, grid, batch=zoo.ROWS).predicted
    for op in ("all_gather", "reduce_scatter"):
        sent = sum(e.bytes for e in traffic.events if e.op == op and e.axes == ("expert",))
        assert sent == zoo.STEPS * sum(e.bytes for e in planned.events if e.op == op and e.axes == ("expert",)) > 0


def test_what_is_sent_is_the_rows_of_other_devices() -> None:
    """All 6 rows choose the first device's expert: it sends no row away, and what it makes of the 3 that come.

    No gradient goes back to the model's input.
    """
    with unidist.ledger() as traffic:
        found, _ = weighed("all to one", unidist.ModelParallel(zoo.mesh({"expert": 2}), experts="dispatch"))
    for a, b in zip(found, weighed("all to one", None)[0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)
    counts, rows = 2 * 8, 3 * WIDTH * 4
    sent = [int(e.bytes) for e in traffic.events if e.op == "all_to_all"]
    assert sent == 3 * [counts, 0, rows, 0]
    assert not any(e.op in ("all_gather", "reduce_scatter") for e in traffic.events if "kernel" in e.purpose)


ALL = "all experts compute all rows: "
WAYS = {
    "all to one": "dispatch: ",
    "einsum": "dispatch: ",
    "looks": "dispatch: ",
    "learned zeros": ALL + "weights that are zero have a gradient",
    "mixes": ALL + "its kernels do not compute one by one, or its rows do not",
}


@pytest.mark.parametrize("sizes", [{"model": 2}, {"data": 2}, {"data": 1, "expert": 2}], ids=str)
@pytest.mark.parametrize("how", WAYS)
def test_ways_to_weigh_what_experts_make(how: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not shown to be the same is computed of all rows, and says so."""
    wanted, _ = weighed(how, None)
    rows = Rows(monkeypatch)
    found, said = weighed(how, unidist.ModelParallel(zoo.mesh({"data": 1, "model": 1} | sizes), experts="dispatch"))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
    assert WAYS[how] in said
    if how in ("all to one", "einsum"):
        assert (rows.all, rows.given) == (0, EXPERTS * rows.summed)


def test_experts_that_draw_compute_all_rows() -> None:
    _, said = weighed("draws", unidist.DataParallel(zoo.mesh({"data": 2}), experts="dispatch"))
    assert ALL + "it draws random numbers" in said

"""What a plan says of rows that are sent to their experts, beside what a step sends whose gate chooses all alike."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import unidist
from unidist.testing.processes import ProcessWorld

MESHES = ({"expert": 2}, {"expert": 4}, {"data": 2, "expert": 2}, {"expert": 2, "context": 2}, {"data": 2, "model": 2})


# Bytes of the sum of a loss.
LOSS = 8


def sent_by(events: Any) -> Counter[tuple[str, tuple[str, ...]]]:
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for event in events:
        if event.purpose not in ("metrics", "logs") and event.bytes > LOSS:
            found[event.op, event.axes] += event.bytes
    return found


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_step_sends_what_is_planned_where_gates_are_even(sizes: dict[str, int]) -> None:
    from tests.planner.dispatched import ROWS, WIDTH, net

    mesh = unidist.Mesh(sizes, devices=range(int(np.prod(list(sizes.values())))))
    unidist.use("sim", devices=mesh.size)
    model = unidist.parallelize(net(), unidist.ModelParallel(mesh, experts="dispatch"))
    model.compile("sgd", "mse")
    given = np.zeros((ROWS, 8), int), np.zeros((ROWS, 8, WIDTH), "float32")
    model.train_on_batch(*given)  # in a first step ranks agree on what experts do
    with unidist.ledger() as sent:
        model.train_on_batch(*given)
    plan = unidist.plan(model, mesh, batch=ROWS, experts="dispatch")
    wanted, found = sent_by(sent.events), sent_by(plan.predicted.events)
    assert found == wanted
    assert bool(wanted["all_to_all", ("expert",)]) is ("expert" in sizes) is ("gates choose" in plan.estimated)
    assert "dispatch: each expert" in "".join(unidist.describe(model).why.values())


def test_a_plan_says_the_most_that_gates_can_make_a_device_send() -> None:
    """It gets all rows of three others, of two kernels each, and gives as many, forward and backward."""
    from tests.planner.dispatched import CHOSEN, EXPERTS, WIDTH, net

    plan = unidist.plan(net(), unidist.Mesh({"expert": 4}, devices=range(4)), batch=16, experts="dispatch")
    rows, counts = 16 // 4 * 8, EXPERTS * 8 * 3 // 4
    even = 2 * (counts + 4 * rows * CHOSEN * WIDTH * 4 * 3 // 4)
    assert f"{even:,} bytes if each is chosen as often, and at most {2 * even:,} of a device" in plan.estimated
    assert f"the collectives are an estimate: {plan.estimated}" in plan.show()
    assert 2 * 4 * rows * CHOSEN * WIDTH * 4 * 3 // 2 <= 2 * even


def test_a_plan_knows_how_many_experts_a_token_has() -> None:
    import keras

    if keras.config.backend() != "torch":
        pytest.skip("rows are sent one by one on torch alone")
    import keras_hub

    heads = {"num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32, "intermediate_dim": 64}
    mesh = unidist.Mesh({"expert": 4}, devices=range(4))
    sizes = []
    for top in (1, 3):
        model = keras_hub.models.MixtralBackbone(64, 2, **heads, num_experts=8, top_k=top)
        plan = unidist.plan(model, mesh, batch=8, sequence=16, experts="dispatch")
        sizes.append([e.bytes for e in plan.predicted.events if e.op == "all_to_all" and e.bytes > 64])
    assert sizes[0] == [2 * 16 * 32 * 4 * 3 // 4] * 8
    assert sizes[1] == [3 * size for size in sizes[0]]


@pytest.mark.processes
@pytest.mark.parametrize("experts", ["dispatch", "all"])
def test_jax_gathers_rows_and_scatters_sums(experts: str, four: ProcessWorld) -> None:
    """Not kernels, which are larger. What the compiler makes of gates is not planned."""
    sent, planned = four.call("tests.planner.dispatched:on_jax", {"data": 2, "expert": 2}, experts)[0]
    back = "reduce_scatter" if experts == "dispatch" else "all_reduce"
    assert set(planned) == {"all_gather", back}
    for op, size in planned.items():
        assert 0.75 * sent[op] < size <= sent[op]

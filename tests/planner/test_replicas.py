"""A plan says what replicas of shards keep within a node, what leaves it, and what more a device holds for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unidist
from unidist import cli

SIZES = {"replica": 2, "shard": 4}
# Bytes of the weights: each of them divides into eight.
WEIGHTS = 4 * (64 * 32 + 32 + 32 * 8 + 8)


def net() -> Any:
    import keras

    x = keras.Input((64,))
    return keras.Model(x, keras.layers.Dense(8)(keras.layers.Dense(32, "relu")(x)))


def planned(zero: int, shard_axis: Any = None, sizes: dict[str, int] = SIZES) -> Any:
    mesh = unidist.Mesh(sizes, devices=range(8))
    return unidist.plan(net(), mesh, data_axis=tuple(sizes), zero=zero, shard_axis=shard_axis).replicas


def test_the_bytes_of_a_node_are_the_closed_form() -> None:
    found = planned(3, "shard")
    assert (found.shard_axes, found.replica_axes, found.devices, found.is_used) == (("shard",), ("replica",), 4, True)
    # Each of four devices sums a quarter of the gradients with one replica.
    assert found.across == WEIGHTS
    # Values are gathered once in so small a model, and gradients scattered: 3/4 of all, by each of four devices.
    assert found.within == 2 * 3 * WEIGHTS
    # In a ring of eight one device of a node sends to the next node.
    assert found.across_of_one == 2 * 7 * WEIGHTS // 8
    # Values, gradients and two slots, of which a device has a quarter in place of an eighth.
    assert found.more_held == 4 * WEIGHTS // 8
    assert found.in_words.endswith("Replicas pay where links between nodes are the slow ones and that memory is free.")


def test_a_step_sends_as_much_between_replicas() -> None:
    unidist.use("sim", devices=4)
    sizes = {"replica": 2, "shard": 2}
    model = unidist.parallelize(net(), unidist.DataParallel(unidist.Mesh(sizes), zero=3, shard_axis="shard"))
    model.compile("adam", "mse")
    with unidist.ledger() as sent:
        model.train_on_batch(np.ones((8, 64), "float32"), np.ones((8, 8), "float32"))
    found = unidist.plan(net(), unidist.Mesh(sizes), data_axis=tuple(sizes), zero=3, shard_axis="shard", batch=8)
    assert 2 * sum(event.bytes for event in sent.events if event.axes == ("replica",)) == found.replicas.across
    assert 2 * sum(event.bytes for event in sent.events if event.axes == ("shard",)) == found.replicas.within


@pytest.mark.parametrize("zero", [1, 3])
def test_they_are_offered_where_they_are_not_used(zero: int) -> None:
    used, offered = planned(zero, "shard"), planned(zero)
    for name in ("within", "across", "across_of_one", "more_held", "shard_axes", "replica_axes"):
        assert getattr(offered, name) == getattr(used, name)
    assert "With shard_axis='shard'" in offered.in_words
    assert used.more_held == (4 if zero == 3 else 3) * WEIGHTS // 8


def test_shards_that_are_apart_are_said() -> None:
    found = planned(3, "shard", {"shard": 4, "replica": 2})
    # Each device's neighbour in the ring of all is in the other node.
    assert found.across_of_one == 4 * 2 * 7 * WEIGHTS // 8
    assert found.in_words.endswith("Put 'shard' last in the mesh: a node's devices are then neighbours.")


@pytest.mark.parametrize(("sizes", "zero"), [({"data": 8}, 3), (SIZES, 0), ({"replica": 1, "shard": 8}, 1)])
def test_nothing_is_said_where_there_is_no_choice(sizes: dict[str, int], zero: int) -> None:
    assert planned(zero, None, sizes) is None


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("from tests.planner.test_replicas import net\n")
    mesh = ["--mesh", "replica=2,shard=4", "--data-axis", "replica,shard", "--zero", "3"]
    assert cli.main(["plan", f"{tmp_path}/model.py:net", *mesh]) == 0
    assert planned(3).in_words in capsys.readouterr().out
    assert cli.main(["plan", f"{tmp_path}/model.py:net", *mesh, "--shard-axis", "shard"]) == 0
    assert planned(3, "shard").in_words in capsys.readouterr().out

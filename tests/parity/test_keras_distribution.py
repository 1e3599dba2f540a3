"""Scripts for keras.distribution run unchanged on torch: the same functions as on plain Keras on JAX, the same numbers.

The reference here is Keras's own distribution on four virtual devices of JAX, without unidist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests import preloaded
from tests.parity.compare import assert_same_values
from tests.parity.worlds import SETTINGS, Worlds
from tests.visible import OF_KERAS
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes
ON_FOUR = ("sim-torch", "torch-4", "jax-4")


class Plain:
    """Keras on JAX with four virtual devices; each script runs once."""

    def __init__(self, world: ProcessWorld) -> None:
        self._world = world
        self._told: dict[str, Any] = {}

    def run(self, script: str) -> Any:
        if script not in self._told:
            self._told[script] = self._world.call(f"tests.parity.scripts:{script}")[0]
        return self._told[script]


def four_devices_of_jax() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    with ProcessWorld(
        1, launcher=None, env=OF_KERAS["jax"], setup=four_devices_of_jax, preload=preloaded.KERAS["jax"]
    ) as world:
        yield Plain(world)


def assert_same_training(found: Any, wanted: Any) -> None:
    for key in ("history", "evaluate", "weights"):
        assert_same_values(found[key], wanted[key])
    assert_same_values({"predict": found["predict"]}, {"predict": wanted["predict"]})


@pytest.mark.parametrize("setting", ON_FOUR)
@pytest.mark.parametrize("script", ["data_parallel", "data_parallel_by_default", "model_parallel"])
def test_a_training_script_gives_kerass_own_numbers(setting: str, script: str, worlds: Worlds, plain: Plain) -> None:
    for told, count, sent in worlds.get(setting).call("tests.parity.scripts:traffic_of", script):
        assert_same_training(told, plain.run(script))
        assert count > 0
        assert sent > 0


@pytest.mark.parametrize("setting", ON_FOUR)
def test_meshes_of_one_shape_and_other_orders_are_not_confused(setting: str, worlds: Worlds, plain: Plain) -> None:
    wanted = plain.run("model_parallel")
    for trainings in worlds.get(setting).call("tests.parity.scripts:two_meshes"):
        assert len(trainings) == 3
        for found in trainings:
            assert_same_training(found, wanted)


@pytest.mark.parametrize("setting", ON_FOUR)
def test_questions_get_kerass_answers(setting: str, worlds: Worlds, plain: Plain) -> None:
    wanted = plain.run("what_keras_tells")
    assert wanted["layouts"]["net/up/kernel"] == (None, "model")
    for told in worlds.get(setting).call("tests.parity.scripts:what_keras_tells"):
        assert told == wanted


@pytest.mark.parametrize(("setting", "devices"), [("torch-2", 2), ("jax-2x2", 4)])
def test_initialize_takes_what_the_launcher_told(setting: str, devices: int) -> None:
    with SETTINGS[setting].world() as world:
        assert world.call("tests.parity.scripts:initialize_first") == [devices] * 2


@pytest.mark.parametrize("setting", ON_FOUR)
def test_distribute_tensor_puts_each_part_where_the_mesh_says(setting: str, worlds: Worlds, plain: Plain) -> None:
    wanted = plain.run("distributed_tensor")
    assert len(wanted["shards"]) == 4
    shards: dict[int, Any] = {}
    for told in worlds.get(setting).call("tests.parity.scripts:distributed_tensor"):
        assert told["shape"] == wanted["shape"] == (4, 8)
        shards.update(told["shards"])
    assert sorted(shards) == sorted(wanted["shards"])
    for rank, shard in wanted["shards"].items():
        assert shard.shape == (2, 4)
        np.testing.assert_array_equal(shards[rank], shard)

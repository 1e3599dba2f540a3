"""What unidist replaces in Keras is what its driver needs, and is put back: Keras is afterwards as it was before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import preloaded
from tests.visible import OF_KERAS
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes

# Of each driver one place that no other replaces.
OF_TORCH = "keras.src.backend.torch.random.dropout"
OF_JAX = "Variable._direct_assign"
OF_DTENSOR = "tensorflow.python.ops.gen_array_ops.concat_v2"
OVER_HOROVOD = "LossScaleOptimizer.apply"
CASES = {
    "torch, horovod, sim": ("torch", [("torch", None), ("horovod", None), ("sim", 4)], [OF_TORCH] * 3),
    "jax": ("jax", [("jax", 4)], [OF_JAX]),
    "tensorflow, horovod, tensorflow": (
        "tensorflow",
        [("tensorflow", 4), ("horovod", None), ("tensorflow", 4)],
        [OF_DTENSOR, OVER_HOROVOD, OF_DTENSOR],
    ),
}
PLACES = {place for _, _, places in CASES.values() for place in places}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Any:
    keras, backends, places = CASES[request.param]
    env, preload = {"CUDA_VISIBLE_DEVICES": "", **OF_KERAS[keras]}, preloaded.KERAS[keras]
    programs = (("trained",), ("used", backends))
    alone, found = (_called(env, preload, *program) for program in programs)
    return places, alone, found


def _called(env: dict[str, str], preload: tuple[str, ...], program: str, *args: Any) -> Any:
    with ProcessWorld(1, launcher=None, env=env, timeout=200, preload=preload) as world:
        return world.call(f"tests.keras.putting_back:{program}", *args)[0]


def test_only_the_driver_in_use_is_on_and_keras_is_left_as_it_was(case: Any) -> None:
    places, alone, found = case
    for used, place in zip(found["used"], places, strict=True):
        others = [other for other in PLACES - {place} if any(where.endswith(other) for where in used["on"])]
        assert any(where.endswith(place) for where in used["on"]), used["name"]
        assert others == [], used["name"]
        assert used["losses"] == pytest.approx(alone, rel=1e-5)
    assert len(found["replaced"]) >= 20
    assert found["left"] == []
    assert found["on"] == []
    assert found["waits"] == []
    assert found["after"] == alone


@pytest.mark.parametrize(("backend", "devices", "count"), [("sim", 2, 1), ("torch", None, 2)])
def test_a_model_of_a_world_that_was_left_raises(backend: str, devices: int | None, count: int, tmp_path: Path) -> None:
    """Without the hooks each process would train alone, or wait for processes that are gone."""
    with ProcessWorld(count, env=OF_KERAS["torch"], timeout=100, preload=preloaded.KERAS["torch"]) as world:
        for found in world.call("tests.keras.putting_back:left", backend, devices, str(tmp_path)):
            for way, raised in found.items():
                assert raised.startswith("BackendMismatchError: "), (way, raised)
                assert "a world that unidist.shutdown() has left" in raised, (way, raised)

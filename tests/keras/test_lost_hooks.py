"""As tests/keras/torch/test_lost_hooks.py, with Keras on JAX and TensorFlow, in a process of each."""

from __future__ import annotations

import random

import pytest

from tests import preloaded
from tests.support.sampling import SEED, unless_all
from tests.visible import OF_KERAS
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes
FEW = 8


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_model_trains_or_is_refused_by_name(backend: str) -> None:
    draw = random.Random(f"{SEED} {backend}")
    numbers = unless_all([draw.randrange(10_000) for _ in range(FEW)], None)
    env = {"CUDA_VISIBLE_DEVICES": "", **OF_KERAS[backend]}
    with ProcessWorld(1, launcher=None, env=env, timeout=600, preload=preloaded.KERAS[backend]) as world:
        *failed, tried = world.call("tests.keras.lost:check_all", backend, numbers)[0]
    assert failed == []
    assert int(tried.split()[0]) >= FEW

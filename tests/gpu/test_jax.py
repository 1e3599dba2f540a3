"""Keras on JAX on one GPU, by unidist and alone. Skipped where JAX was installed for CPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu import test_gpu
from tests.gpu.device import NAME, ON_GPU
from tests.gpu.test_gpu import ONE
from tests.visible import OF_KERAS
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.processes import ProcessWorld

PROGRAMS = "tests.gpu.on_jax"
# JAX takes most of a GPU's memory at its start, which the other tests' processes need too. Its products are of fewer
# digits there, if nobody says otherwise.
OF_A_GPU = {
    "KERAS_BACKEND": "jax",
    "CUDA_VISIBLE_DEVICES": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}
ENVIRONMENT = OF_A_GPU if ON_GPU else OF_KERAS["jax"]


@pytest.fixture(scope="module", autouse=True)
def jax_has_the_device() -> None:
    with ProcessWorld(1, launcher=None, env=ENVIRONMENT, timeout=120) as found:
        if found.call(f"{PROGRAMS}:lacks_a_gpu") == [True]:
            pytest.skip("JAX finds no GPU here: it was installed for CPUs")


def _process(joins: bool) -> ProcessWorld:
    setup = f"{PROGRAMS}:start"
    return ProcessWorld(1, launcher=None, env=ENVIRONMENT, setup=setup, setup_args=(joins,), timeout=300)


@pytest.fixture(scope="module")
def alone_on_jax() -> Iterator[ProcessWorld]:
    with _process(joins=False) as found:
        yield found


@pytest.fixture(scope="module")
def one_on_jax() -> Iterator[ProcessWorld]:
    with _process(joins=True) as found:
        yield found


class TestOfOneDevice(ConformanceSuite):
    """All laws that say something of one device, on meshes of one place."""

    backend = "jax"
    world = f"{PROGRAMS}:world"
    processes = 1
    left_out = frozenset(["devices", "meshes", "ledger_of_broadcast_and_permute"])
    launcher = None
    env = ENVIRONMENT
    timeout = 280.0


def test_everything_is_on_the_device(one_on_jax: ProcessWorld) -> None:
    assert one_on_jax.call(f"{PROGRAMS}:places") == [{NAME}]


@pytest.mark.parametrize("case", test_gpu.CASES)
def test_one_device_trains_as_keras_alone(case: str, alone_on_jax: ProcessWorld, one_on_jax: ProcessWorld) -> None:
    (wanted,) = alone_on_jax.call("tests.parity.train:train", case, None)
    (found,) = one_on_jax.call("tests.parity.train:train", case, ONE)
    assert found.variables
    test_gpu.assert_trained_as_one_device(found, wanted)

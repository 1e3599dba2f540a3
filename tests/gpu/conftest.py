"""Without CUDA these tests are skipped. TESTS_GPU_DEVICE=cpu runs them on CPUs, to try all but the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.device import DEVICE, ON_GPU, OVER_GLOO, process, ranks, start
from unidist.testing.processes import ProcessWorld

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without = ON_GPU and not torch.cuda.is_available()
    skipped = pytest.mark.skip(reason=f"there is no CUDA here (TESTS_GPU_DEVICE is {DEVICE!r})")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.timeout(600))
            if without:
                item.add_marker(skipped)


@pytest.fixture(scope="package")
def alone() -> Iterator[ProcessWorld]:
    """Keras alone, on the device."""
    with process(joins=False) as found:
        yield found


@pytest.fixture(scope="package")
def one() -> Iterator[ProcessWorld]:
    """A world of one."""
    with process(joins=True) as found:
        yield found


@pytest.fixture(scope="package")
def two() -> Iterator[ProcessWorld]:
    """Two ranks on one GPU."""
    with ProcessWorld(2, env=OVER_GLOO, setup=start, setup_args=(True,), timeout=300) as found:
        yield found


@pytest.fixture(scope="package")
def pair() -> Iterator[ProcessWorld]:
    """Two ranks on two GPUs."""
    with ranks(2) as found:
        yield found

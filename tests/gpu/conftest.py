"""Without CUDA these tests are skipped. TESTS_GPU_DEVICE=cpu runs them on CPUs, to try all but the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.programs import DEVICE, ON_GPU

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_GPU and not torch.cuda.is_available():
        skipped = pytest.mark.skip(reason=f"there is no CUDA here (TESTS_GPU_DEVICE is {DEVICE!r})")
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(skipped)

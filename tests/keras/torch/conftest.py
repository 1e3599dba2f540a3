"""Models on torch in the simulator, four virtual devices in this process."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import pytest

import unidist


@pytest.fixture(autouse=True)
def four_devices():
    unidist.use("sim", devices=4)
    return

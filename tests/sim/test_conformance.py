"""The simulator obeys the laws that every adapter obeys."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import unidist
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World


def bfloat16_too(value: np.ndarray, dtype: str) -> np.ndarray:
    return value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def six_devices() -> World:
    return World(backend=unidist.use("sim", devices=6), array=bfloat16_too, layout_pairs=200)


def eight_devices() -> World:
    return World(backend=unidist.use("sim", devices=8), array=bfloat16_too)


class TestSixDevices(ConformanceSuite):
    backend = "sim"
    world = f"{__name__}:six_devices"
    differentiable = False


class TestEightDevices(ConformanceSuite):
    backend = "sim"
    world = f"{__name__}:eight_devices"
    differentiable = False

"""Comparisons that name the first thing that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TOLERANCE = 1e-5


def assert_same_values(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = TOLERANCE) -> None:
    """The same names in the same order, and values within the tolerance (absolute and relative)."""
    assert list(found) == list(wanted), f"found {list(found)}, on one device {list(wanted)}"
    for name, value in wanted.items():
        left, right = np.asarray(found[name], dtype="float64"), np.asarray(value, dtype="float64")
        assert left.shape == right.shape, f"{name}: shape {left.shape}, on one device {right.shape}"
        assert np.isfinite(left).all(), f"{name} is not finite"
        apart = np.abs(left - right) - tolerance * np.abs(right)
        assert apart.size == 0 or apart.max() <= tolerance, f"{name} is {apart.max():.2e} from one device's"


def assert_same_arrays(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = TOLERANCE) -> None:
    """As assert_same_values by order alone: Keras names the variables of a loaded Sequential model without its name."""
    assert len(found) == len(wanted)
    assert_same_values(dict(zip(wanted, found.values(), strict=True)), wanted, tolerance)


def assert_same_logs(
    found: Sequence[Mapping[str, float]], wanted: Sequence[Mapping[str, float]], tolerance: float = TOLERANCE
) -> None:
    """The same number of steps, and each step's loss and metrics within the tolerance."""
    assert len(found) == len(wanted), f"{len(found)} steps, on one device {len(wanted)}"
    for step, (left, right) in enumerate(zip(found, wanted, strict=True)):
        for name, value in right.items():
            assert name in left, f"step {step} has no {name}: {sorted(left)}"
            apart = abs(left[name] - value)
            assert apart <= tolerance * (1 + abs(value)), f"step {step}: {name} is {left[name]}, on one device {value}"


def moved(start: Mapping[str, Any], end: Mapping[str, Any]) -> float:
    """The largest change of any value."""
    return max(float(np.abs(np.asarray(end[name]) - np.asarray(start[name])).max()) for name in start)

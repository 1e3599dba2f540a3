"""Comparison of what two runs told."""

from __future__ import annotations

from typing import Any

import numpy as np

TOLERANCE = 1e-5
NUMBERS = ("history", "evaluate", "predict", "outputs", "weights", "slots")


def close(found: Any, expected: Any, what: str = "") -> None:
    """Every number of a tree within the tolerance, the structure the same."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), what
        for key in expected:
            close(found[key], expected[key], f"{what}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for k, (f, e) in enumerate(zip(found, expected, strict=True)):
            close(f, e, f"{what}/{k}")
    else:
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE, err_msg=what)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same numbers of every kind that the expected run told."""
    kinds = [key for key in NUMBERS if key in expected]
    assert "weights" in kinds
    for key in kinds:
        close(found[key], expected[key], key)

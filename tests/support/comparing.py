"""Comparison of what two runs recorded."""

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


def same_in_half_precision(found: dict[str, Any], alone: dict[str, Any], bits: int) -> None:
    """Sums in another order differ in the last of the bits that a number has, and Adam's steps are of 0.01."""
    for key in ("history", "evaluate"):
        loss, wanted = np.ravel(found[key]["loss"]), np.ravel(alone[key]["loss"])
        np.testing.assert_allclose(loss, wanted, rtol=2.0 ** (1 - bits))
    for path, value in alone["weights"].items():
        np.testing.assert_allclose(found["weights"][path], value, atol=2.0 ** (2 - bits), err_msg=path)


def same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same losses and weights to the last bit."""
    assert found["history"] == expected["history"]
    for path, value in expected["weights"].items():
        np.testing.assert_array_equal(found["weights"][path], value)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same numbers of every kind that the expected run recorded."""
    kinds = [key for key in NUMBERS if key in expected]
    assert "weights" in kinds
    for key in kinds:
        close(found[key], expected[key], key)

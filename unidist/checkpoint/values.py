"""Reads a tensor's bytes as numbers, also in dtypes that NumPy lacks, and compares two of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidist.checkpoint.checksums import Bytes


def numbers(data: Bytes, dtype: str) -> NDArray[Any]:
    """Bytes as numbers of NumPy: those of a dtype that it lacks as wider ones, exactly."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e5m2":
        return (data.astype(np.uint16) << 8).view(np.float16)
    if dtype == "float8_e4m3fn":
        return _E4M3FN[data]
    return data.view(dtype)


def _e4m3fn(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 0x7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return float(sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)))


_E4M3FN = np.array([_e4m3fn(byte) for byte in range(256)], np.float32)


def difference(left: Bytes, right: Bytes, dtype: str) -> float:
    """The largest distance of two numbers in the same place; NaN where only one of them is."""
    if not len(left) or np.array_equal(left, right):
        return 0.0
    a, b = numbers(left, dtype), numbers(right, dtype)
    if a.dtype.kind in "iu":
        wide = np.uint64 if a.dtype == np.uint64 else np.int64
        a, b = a.astype(wide), b.astype(wide)
        # Of two's complements: the difference of the farthest does not fit into an int64.
        return float((np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).max())
    wide_float = np.complex128 if a.dtype.kind == "c" else np.float64
    # What is no number stays none, of whatever kind.
    with np.errstate(invalid="ignore"):
        a, b = a.astype(wide_float), b.astype(wide_float)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a - b)
    # Infinities of one sign are none apart.
    distance[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
    return float(distance.max())

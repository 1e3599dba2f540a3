"""CRC32C of blocks of 2,048 bytes: whoever reads a run of bytes reads at most 4,094 more to verify it.

Who wrote a range has counted its blocks from the range's first byte; the last one may be shorter. Each has four bytes
of checksum, two thousandths of the data.

Measured on 256 MiB of one core of an AMD EPYC (google-crc32c 1.9 in C), in seconds for 1 GiB:

| block | rows of an array | `tobytes` of each row | slices of bytes | a list of the blocks, by the MiB |
|---|---|---|---|---|
| 2,048 bytes | 0.19 | 0.29 | 0.30 | 0.26 |
| 4,096 bytes | 0.21 | 0.20 | 0.20 | 0.20 |
| 65,536 bytes | 0.09 | 0.12 | 0.17 | 0.12 |
| 1 MiB | 0.09 | 0.11 | 0.14 | 0.12 |

So rows of an array are handed on as they are. Blocks of 65,536 bytes would save a tenth of a second for each GiB, and a
reader of a slice would read up to 128 KiB more for each of its runs. (A memoryview is refused by the library.)
"""

from __future__ import annotations

from array import array

import numpy as np
from google_crc32c import extend, value
from numpy.typing import NDArray

BLOCK = 2048
Bytes = NDArray[np.uint8]


def crc(data: bytes | Bytes, before: int = 0) -> int:
    """The CRC32C of bytes that follow others, whose own is `before`."""
    return int(extend(before, data))


def sums(data: Bytes) -> array[int]:
    """The checksum of each block; the last one may be shorter."""
    full = len(data) // BLOCK * BLOCK
    found = array("I", map(value, data[:full].reshape(-1, BLOCK)))
    if full < len(data):
        found.append(value(data[full:]))
    return found


class Running:
    """The checksums of a range that is written piece by piece, wherever one ends."""

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self.sums = array("I")

    def add(self, data: Bytes) -> None:
        begun = (self.end - self.begin) % BLOCK
        missing = min(BLOCK - begun, len(data)) if begun else 0
        if missing:
            self.sums[-1] = crc(data[:missing], self.sums[-1])
        self.sums.extend(sums(data[missing:]))
        self.end += len(data)

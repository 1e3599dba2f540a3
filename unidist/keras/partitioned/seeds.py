"""Random state: what Keras, NumPy and Python draw next is the same on every process."""

from __future__ import annotations

from unidist.keras import seeds
from unidist.keras.partitioned import processes


def align() -> None:
    """Gives every process the random state of process 0. A collective of the world."""
    if processes.several():
        seeds.restore(processes.from_first(seeds.state(), "random state"))

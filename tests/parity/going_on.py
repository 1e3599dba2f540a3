"""Records of a training that is interrupted, and of one that is not (tests/parity/interrupted.py trains them)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ROWS, BATCH, EPOCHS = 22, 4, 3
# Kinds of data; each Keras backend takes all.
ARRAYS = ("arrays", "arrays by batches", "short epochs", "counted epochs")
OF_PYTHON = ("PyDataset", "generator")
OF_TORCH = ("DataLoader", "DataLoader with a generator")
OF_TENSORFLOW = ("tf.data", "tf.data without end", "tf.data of unknown length")


@dataclass
class Told:
    """What a training came to, seen by one process.

    Attributes:
        steps: (epoch, batch) that callbacks saw.
        asked: the rows of each batch that were read, where the source knows.
        resumed: steps that were made before it was resumed, as this process's record says.
    """

    history: dict[str, list[float]] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    slots: list[Any] = field(default_factory=list)
    rate: float = 0.0
    random: list[float] = field(default_factory=list)
    counted: int = 0
    raised: str = ""
    resumed: int = 0

"""What the processes of the GPU tests give back; without Keras, which these tests themselves do not import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Of a training in test_streams.py.
STEPS = 6


@dataclass
class Trained:
    """What a training came to.

    Attributes:
        held_up: of what is launched and what is used, by kind, how many were held up.
        launched: how many there were of each kind.
        buckets: of the model.
        blocking: what CUDA_LAUNCH_BLOCKING says in the process.
    """

    weights: dict[str, Any]
    buckets: int = 0
    held_up: dict[str, int] = field(default_factory=dict)
    launched: dict[str, int] = field(default_factory=dict)
    blocking: str | None = None

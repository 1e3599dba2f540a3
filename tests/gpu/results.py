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


@dataclass
class Held:
    """Bytes of a rank, behind a step and within the next one.

    Attributes:
        model: of the whole model's weights.
        weights, slots, gradients: what this rank keeps of each.
        allocated, made: by a GPU's allocator, all that is kept, and what a step makes beside that at most at one time.
        units: of the largest unit of weights that is fetched, or joined, at once.
        buckets: of the largest bucket of gradients. bucket_count: how many there are.
        layer: of the largest gradient of one variable.
        activations: of the outputs of all layers, of this rank's rows.
        on_host: of the slots that rest in host memory. pinned: whether they do in memory that a GPU reads by itself.
    """

    model: int
    weights: int
    slots: int
    gradients: int
    allocated: int
    made: int
    units: int
    buckets: int
    bucket_count: int
    layer: int
    activations: int
    on_host: int = 0
    pinned: bool = False

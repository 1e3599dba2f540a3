"""Row: what is told of one variable; shared by the engines."""

from __future__ import annotations

from dataclasses import dataclass

from unidist.algebra import Layout


@dataclass(frozen=True, slots=True)
class Row:
    """One variable of a model or its optimizer.

    Attributes:
        shape: the global shape.
        layout: None where the variable is not distributed.
        local_shape: what the first device of this process holds.
        bytes_per_device: bytes held by the device that holds most.
        kind: "weights" for a variable of the model, "slots" for one of its optimizer.
        gradient_bytes: bytes of its gradient that the device holding most holds now; 0 where the engine keeps none
            between steps.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    local_shape: tuple[int, ...]
    bytes_per_device: int
    kind: str = "weights"
    gradient_bytes: int = 0

    @property
    def is_sharded(self) -> bool:
        return self.layout is not None and bool(self.layout.dims)

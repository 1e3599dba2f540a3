"""Row: what is shown of one variable; shared by the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from unidist.algebra import Layout


@dataclass(frozen=True, slots=True)
class Row:
    """One variable of a model or its optimizer.

    Attributes:
        shape: the global shape.
        layout: None where the variable is not distributed.
        local_shape: what the first device of this process holds.
        bytes_per_device: bytes held by the device that holds most; 0 of what rests in host memory.
        kind: "weights" for a variable of the model, "slots" for one of its optimizer.
        gradient_bytes: bytes of its gradient that the device holding most holds now; 0 where the engine keeps none
            between steps.
        host_bytes: bytes that rest in host memory for the device that holds most.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    local_shape: tuple[int, ...]
    bytes_per_device: int
    kind: str = "weights"
    gradient_bytes: int = 0
    host_bytes: int = 0

    @property
    def in_words(self) -> str:
        """Says how it is laid out."""
        return "not distributed" if self.layout is None else self.layout.in_words

    @property
    def is_sharded(self) -> bool:
        return self.layout is not None and bool(self.layout.dims)


def rows_of(model: Any, row: Callable[[Any, str], Row]) -> Iterator[Row]:
    """row(variable, kind) of each variable of the model, then of its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    slots = optimizer.variables if optimizer is not None else []
    for variable in model.variables:
        yield row(variable, "weights")
    for variable in slots:
        yield row(variable, "slots")

"""Says which checkpoint a training goes on from, as process 0 finds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from unidist.checkpoint.reading import Reader
from unidist.errors import CheckpointError
from unidist.keras.checkpoint import api as checkpoints
from unidist.keras.checkpoint.states import by_first
from unidist.keras.consistency.processes import ALONE, taking_part


def found(directory: str, resume: bool) -> tuple[int, dict[str, Any] | None]:
    """Returns (the latest checkpoint's number or 0, its position if wanted), as process 0 finds them.

    Raises:
        CheckpointError: it holds no position, or cannot be read; on all processes.
    """
    # What an earlier fit of this program began to write.
    checkpoints.wait()
    seen = by_first(taking_part.get() or ALONE, lambda: _look(directory, resume))
    return seen["number"], seen["position"]


def _look(directory: str, resume: bool) -> dict[str, Any]:
    number = checkpoints.latest(directory)
    if number is None or not resume:
        return {"number": number or 0, "position": None}
    with named(directory, number), Reader(directory, number, "off") as reader:
        position = position_in(reader.facts)
    if position is None:
        raise CheckpointError(
            f"checkpoint {number} in {directory} was not written by unidist.Checkpoint: there is no place in a "
            "training to go on from. Take its values with unidist.restore, and give this training another directory"
        )
    return {"number": number, "position": position}


@contextlib.contextmanager
def named(directory: str, number: int) -> Iterator[None]:
    """Damage of a step, as an error that says which one it is, and what to do."""
    try:
        yield
    except CheckpointError as error:
        if not error.file:
            raise
        raise CheckpointError(
            f"checkpoint {number} in {directory} is not what was written: {error}. Take it away, and the training goes "
            "on from the one before",
            file=error.file,
            tensor=error.tensor,
        ) from error


def position_in(facts: Mapping[str, Any]) -> Any:
    """Returns the position in a checkpoint's facts; None where it is no training's."""
    found = facts.get("facts")
    return found.get("position") if isinstance(found, dict) else None

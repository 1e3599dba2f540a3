"""Notes where a training stands: epoch, step, what data's order hangs on, what callbacks counted.

All of it is JSON: what comes from a file is data, never code. Who goes on finds it in the latest checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from unidist.checkpoint.reading import Reader
from unidist.errors import CheckpointError
from unidist.keras import seeds
from unidist.keras.checkpoint import api as checkpoints
from unidist.keras.checkpoint.states import by_first
from unidist.keras.consistency.processes import ALONE, taking_part

# (object's place among those looked at) -> attribute -> value, packed.
Attributes = dict[str, dict[str, Any]]
_Sort = tuple[type, Callable[[Any], Any], Callable[[Any, Any], None]]
_PLAIN = (bool, int, float, np.generic, type(None))
_SORTS = ("array", "number", "numbers", "numpy", "legacy", "python", "torch")


@dataclass
class Course:
    """One iterator over the data, which may serve several epochs where these are shorter.

    Attributes:
        random: the random state of the process before it was made.
        source: that of the data's own attributes.
        first: the random state before its first batch, where it was made long before.
        taken: batches that were trained on.
        first_source: the data's own attributes then.
    """

    random: str
    source: Attributes
    first: str | None = None
    taken: int = 0
    first_source: Attributes = field(default_factory=dict)


@dataclass
class Position:
    """Says where a training stands.

    Attributes:
        epoch: the one that is under way, or the next.
        step: how many of its batches were trained on.
        total: how many batches were trained on in all.
        ended: a callback has ended the training early.
        made: the random state before the data was made ready.
        random: that of now.
        source: the data's own attributes now: those that have changed.
        course: the iterator that is under way, if one is.
        batches: in an epoch, where that is found at its end.
        passes: how many batches were drawn of each iterator over a tf.data.Dataset, the one under way included.
        history: of the epochs that have ended.
        callbacks: their own attributes: those that have changed.
    """

    epoch: int
    step: int
    total: int
    ended: bool
    made: str
    random: str
    source: Attributes
    course: Course | None
    batches: int | None = None
    passes: list[int] = field(default_factory=list)
    history: dict[str, Any] = field(default_factory=dict)
    callbacks: Attributes = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any], where: str = "") -> Position:
        """Raises CheckpointError: it is none, or that of another version."""
        try:
            course = found["course"]
            return cls(**{**found, "course": None if course is None else Course(**course)})
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{where}: holds no position that this version of unidist can go on from") from error


# in checkpoints -------------------------------------------------------------------------------------------------------


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
        found = position_in(reader.facts)
    if found is None:
        raise CheckpointError(
            f"checkpoint {number} in {directory} was not written by unidist.Checkpoint: there is no place in a "
            "training to go on from. Take its values with unidist.restore, and give this training another directory"
        )
    return {"number": number, "position": found}


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


# attributes of objects ------------------------------------------------------------------------------------------------


def attributes(objects: Iterable[tuple[str, Any]]) -> Attributes:
    """Returns what can be packed of objects' own attributes: numbers, arrays and random generators."""
    return {
        name: {key: packed for key, value in vars(one).items() if (packed := _packed(value)) is not _NEVER}
        for name, one in objects
    }


def changed(now: Attributes, before: Attributes) -> Attributes:
    """Returns the attributes of now that were not so before."""
    return {
        name: {key: value for key, value in own.items() if before.get(name, {}).get(key, _NEVER) != value}
        for name, own in now.items()
    }


def set_attributes(objects: Iterable[tuple[str, Any]], found: Attributes) -> None:
    """Gives objects their attributes.

    A generator of random numbers stays the one that it is, and others see it too.
    """
    for name, one in objects:
        for key, value in found.get(name, {}).items():
            sort = next(iter(value)) if isinstance(value, dict) else None
            held = vars(one).get(key)
            if key not in vars(one) and hasattr(one, key):
                continue
            if held is not None and (generator := _generators().get(sort)) is not None:
                generator[2](held, unpacked(value[sort]))
            else:
                setattr(one, key, unpacked(value))


_NEVER = object()


def _packed(value: Any) -> Any:
    """As JSON, or _NEVER."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": repr(float(value))}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject:
            return _NEVER
        return seeds.packed(array)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        return {"numbers": value.copy()}
    for sort, (kind, state, _) in _generators().items():
        if isinstance(value, kind):
            return {sort: packed(state(value))}
    return _NEVER


def packed(value: Any) -> Any:
    """A tree of dictionaries, lists, texts and numbers as JSON, arrays too.

    Raises:
        TypeError: it holds something else.
    """
    if isinstance(value, dict):
        return {str(key): packed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [packed(one) for one in value]
    found = value if isinstance(value, str) else _packed(value)
    if found is _NEVER:
        raise TypeError(f"{type(value).__name__} is neither a number nor an array")
    return found


def unpacked(value: Any) -> Any:
    """Returns what `packed` was given; tuples as lists."""
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    if not isinstance(value, dict):
        return value
    sort = next(iter(value), None)
    if len(value) != 1 or sort not in _SORTS:
        return {key: unpacked(one) for key, one in value.items()}
    if sort == "array":
        array = seeds.unpacked(value)
        return array if array.shape else array[()]
    return float(value["number"]) if sort == "number" else value[sort]


def _generators() -> dict[str | None, _Sort]:
    """Sort -> (class of generators, how one gives its state, how it gets one)."""
    found: dict[str | None, _Sort] = {
        "numpy": (np.random.Generator, lambda one: one.bit_generator.state, _set_numpy),
        "legacy": (np.random.RandomState, lambda one: one.get_state(legacy=False), lambda one, to: one.set_state(to)),
        "python": (random.Random, lambda one: one.getstate(), lambda one, to: one.setstate(seeds.as_tuples(to))),
    }
    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].Generator, lambda one: one.get_state().numpy(), _set_torch
    return found


def _set_numpy(held: Any, state: Any) -> None:
    held.bit_generator.state = state


def _set_torch(held: Any, state: Any) -> None:
    held.set_state(sys.modules["torch"].from_numpy(state))

"""The entrances of Keras's trainer: what all drivers do where a distributed model enters them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from unidist.errors import UnidistError
from unidist.keras.consistency import agreement
from unidist.keras.consistency.agreement import Peers
from unidist.keras.consistency.processes import Processes, taking_part
from unidist.keras.patching import patches
from unidist.keras.patching.compat import tree
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.records import model_record
from unidist.keras.writers import by_one

ENTRANCES = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
# Inside, Keras's own entrance runs. Gives the processes that take part, and what finds the peers that must agree.
Entering = AbstractContextManager[tuple[Processes | None, Callable[[], Peers | None]]]


def hooks(
    trainer: Any, find: Callable[[Any], Any], enter: Callable[[Any, inspect.BoundArguments, str], Entering]
) -> Iterator[Hook]:
    """Makes the hooks of a driver's trainer.

    One process shows progress and writes, and all compare what they were given.

    Args:
        trainer: Keras's class.
        find: gives what the driver works with for a model, or None where Keras goes on alone.
        enter: is given that, the arguments of the entrance and its name. It aligns seeds, and places what is to be.
    """
    entering = functools.partial(_entering, find=find, enter=enter)
    return (Hook(trainer, name, entering, "all processes enter alike") for name in ENTRANCES)


def _entering(original: Any, find: Any, enter: Any) -> Any:
    name, signature = original.__name__, inspect.signature(original)

    @functools.wraps(original)
    def entrance(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = find(self)
        if found is None:
            return original(self, *args, **kwargs)
        patches.check(self)
        given = signature.bind(self, *args, **kwargs)
        record = model_record.of(self)
        record.rows = _rows(given.arguments, name)
        record.calls += (is_batch := name.endswith("_on_batch"))
        with enter(found, given, name) as (processes, find_peers), by_one(given, processes):
            if not is_batch or agreement.is_turn(record.calls):
                agreement.begin(given, name, find_peers)
            token = taking_part.set(processes)
            try:
                return original(*given.args, **given.kwargs)
            finally:
                taking_part.reset(token)

    return entrance


def _rows(given: dict[str, Any], name: str) -> int | None:
    """Rows of the first batch, where the arguments of an entrance say it: those of arrays, or a loader's."""
    x = given.get("x")
    if isinstance(size := getattr(x, "batch_size", None), int):
        return size
    lengths = [leaf.shape[0] for leaf in tree.flatten(x) if len(getattr(leaf, "shape", None) or ())]
    if not lengths:
        return None
    return int(lengths[0] if name.endswith("_on_batch") else min(lengths[0], given.get("batch_size") or 32))


def hook_of_errors() -> Hook:
    """Keeps the class of an error of unidist's that passes through code which TensorFlow has converted.

    TensorFlow makes a StagingError of what it does not know.
    """

    @calling
    def create_exception(original: Any, self: Any, source_error: Exception) -> Any:
        if not isinstance(source_error, UnidistError):
            return original(self, source_error)
        found = copy.copy(source_error)
        found.args = (self.get_message(),)
        return found

    where = "tensorflow.python.autograph.impl.api:_ErrorMetadata"
    return Hook(where, "create_exception", create_exception, "errors of unidist's keep their class")

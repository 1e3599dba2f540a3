"""Metrics: ranks hold summands of their states, which come together where a result is read.

Keras declares the states of metrics `synchronization="on_read", aggregation="sum"`: this is that reading. All states of
a model are summed in one collective: after each step whose logs somebody reads, and at the end of each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from unidist import events
from unidist.keras.patching.compat import Trainer, in_symbolic_scope, tree
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.records import model_record
from unidist.keras.torch.context import Frame, frame
from unidist.keras.torch.params.variables import DistributedVariable


def hooks() -> tuple[Hook, ...]:
    """Outside of a frame Trainer.get_metrics_result is as before."""
    why = "metrics are of all rows"
    return (Hook(Trainer, "get_metrics_result", calling(_get_metrics_result), why),)


def _get_metrics_result(original: Any, self: Any) -> Any:
    here = frame()
    engine = model_record.of(self).engine
    if here is not None:
        if engine is None or engine.logs_are_read:
            return _merged(original, self, here)
        # A program's outputs are one list, whoever reads them.
        return _unmerged(original, self, here) if self.jit_compile else Unread(engine)
    if engine is None or in_symbolic_scope():
        return original(self)
    is_virtual = engine.world.is_virtual
    found = original(self) if is_virtual else engine.world.run(lambda at_work: _merged(original, self, at_work))
    engine.names_of_results = tuple(found)
    return found


class Unread(dict[str, Any]):
    """Stands for the logs of a step that nobody reads: no result is computed for them.

    Keras asks for their names alone, behind the last step, to see whether the model's results stand for them. They do,
    so their names are those of the results that were read last.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine

    def keys(self) -> Any:
        return self._engine.names_of_results


def _merged(original: Any, model: Any, here: Frame) -> Any:
    with here.reading(summed(here, model.metrics_variables)):
        return original(model)


def _unmerged(original: Any, model: Any, here: Frame) -> Any:
    own = [v for v in model.metrics_variables if isinstance(v, DistributedVariable)]
    with here.reading({id(v): v._storage.local(here) for v in own}):
        return original(model)


def summed(here: Frame, variables: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Returns id -> value summed over the data axes, of variables that ranks have in parts.

    Those with other last bits count too: one collective a dtype.
    """
    own = [v for v in variables if isinstance(v, DistributedVariable) and id(v) not in here.overrides]
    apart = [v for v in own if v._storage.layout.partial or _drifts(here, v)]
    with events.for_purpose("metrics"):
        totals = here.world.agreed(here, [v._storage.local(here) for v in apart], here.world.data_axes)
    return {id(v): total for v, total in zip(apart, totals, strict=True)}


def _drifts(here: Frame, variable: Any) -> bool:
    """Returns whether ranks that compute the same may get other values, where nothing is summed."""
    if not here.world.drifting or here.world.data_axes:
        return False
    is_real: bool = variable._storage.leaf(here.rank).is_floating_point()
    return is_real


def adopt(metrics: Iterable[Any]) -> None:
    """Lets metrics, and those inside of them, read their states by one collective."""
    for metric in metrics:
        for leaf in _leaves(metric):
            if "result" not in vars(leaf):
                object.__setattr__(leaf, "result", _merging(leaf, leaf.result))


def _leaves(metric: Any) -> list[Any]:
    inner = getattr(metric, "_metrics", [])
    return [metric, *[leaf for m in inner for leaf in _leaves(m)]]


def _merging(metric: Any, original: Callable[[], Any]) -> Callable[[], Any]:
    def result() -> Any:
        here = frame()
        if here is None:
            return original()
        with here.reading(summed(here, metric.variables)):
            return tree.map_structure(_read, original())

    return result


def _read(value: Any) -> Any:
    """A result that is a variable is read here: behind the frame each read of it would be a collective."""
    return value.value if isinstance(value, DistributedVariable) else value

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
        # Where nobody reads the logs of a step, its results stay this rank's: those of the epoch are merged below.
        return (
            _merged(original, self, here) if engine is None or engine.logs_are_read else _unmerged(original, self, here)
        )
    if engine is None or engine.world.is_virtual or in_symbolic_scope():
        return original(self)
    return engine.world.run(lambda at_work: _merged(original, self, at_work))


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

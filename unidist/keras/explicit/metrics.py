"""Metrics: each rank sums up its own rows; a result is computed from the states summed over the data axes.

Keras declares the states of metrics `synchronization="on_read", aggregation="sum"`: this is that reading. All states of
a model are summed in one collective: after each step whose logs somebody reads, and at the end of each epoch. A metric
with an update_state that is not Keras's may keep another thing than sums: it is given the rows of all shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from unidist import events
from unidist.keras import sessions
from unidist.keras.compat import Mean, Trainer, in_symbolic_scope, set_keras_mask, tree
from unidist.keras.explicit import losses
from unidist.keras.explicit.context import Frame, Rows, frame
from unidist.keras.explicit.mixing import is_of_keras
from unidist.keras.explicit.variables import DistributedVariable
from unidist.keras.interception import Hook, kept

_originals: dict[str, Any] = {}


def hooks() -> tuple[Hook, ...]:
    """Outside of a frame Trainer.get_metrics_result is as before."""
    why = "metrics are of all rows"
    return (Hook(Trainer, "get_metrics_result", kept(_originals, "result", _get_metrics_result), why),)


def _get_metrics_result(self: Any) -> Any:
    here = frame()
    engine = sessions.of(self).engine
    if here is not None:
        # Where nobody reads the logs of a step, its results stay this rank's: those of the epoch are merged below.
        return _merged(self, here) if engine is None or engine.logs_are_read else _unmerged(self, here)
    if engine is None or engine.world.is_virtual or in_symbolic_scope():
        return _originals["result"](self)
    return engine.world.run(lambda at_work: _merged(self, at_work))


def _merged(model: Any, here: Frame) -> Any:
    with here.reading(summed(here, model.metrics_variables)):
        return _originals["result"](model)


def _unmerged(model: Any, here: Frame) -> Any:
    own = [v for v in model.metrics_variables if isinstance(v, DistributedVariable)]
    with here.reading({id(v): v._place.local(here) for v in own}):
        return _originals["result"](model)


def summed(here: Frame, variables: Iterable[Any]) -> dict[int, torch.Tensor]:
    """id -> value summed over the data axes, for the partial variables among these: one collective a dtype."""
    todo: dict[torch.dtype, list[DistributedVariable]] = {}
    for variable in variables:
        if not isinstance(variable, DistributedVariable) or id(variable) in here.overrides:
            continue
        if variable._place.layout.partial:
            todo.setdefault(variable._place.local(here).dtype, []).append(variable)
    values: dict[int, torch.Tensor] = {}
    for members in todo.values():
        locals_ = [v._place.local(here).detach() for v in members]
        with events.for_purpose("metrics"):
            total = here.world.sum_over_data(torch.cat([x.reshape(-1) for x in locals_]))
        parts = total.split([x.numel() for x in locals_])
        values |= {id(v): part.view(x.shape) for v, part, x in zip(members, parts, locals_, strict=True)}
    return values


def adopt(metrics: Iterable[Any], loss_trackers: Iterable[Any]) -> None:
    """Makes a model's metrics merge on `result()`, and its loss trackers count contributions."""
    trackers = list(loss_trackers)
    for metric in metrics:
        for leaf in _leaves(metric):
            if "result" not in vars(leaf):
                object.__setattr__(leaf, "result", _merging(leaf, leaf.result))
                if _counts_its_own_way(leaf):
                    object.__setattr__(leaf, "update_state", _of_all_rows(leaf.update_state))
                elif type(leaf).update_state is Mean.update_state and not any(leaf is t for t in trackers):
                    object.__setattr__(leaf, "update_state", _by_share(leaf, leaf.update_state))
    for tracker in trackers:
        if isinstance(tracker, Mean) and "update_state" not in vars(tracker):
            object.__setattr__(tracker, "update_state", _contributing(tracker, tracker.update_state))


def _leaves(metric: Any) -> list[Any]:
    inner = getattr(metric, "_metrics", [])
    return [metric, *[leaf for m in inner for leaf in _leaves(m)]]


def _merging(metric: Any, original: Callable[[], Any]) -> Callable[[], Any]:
    def result() -> Any:
        here = frame()
        if here is None:
            return original()
        with here.reading(summed(here, metric.variables)):
            return original()

    return result


def _counts_its_own_way(metric: Any) -> bool:
    """Whether its state may be another thing than a sum over rows, as those of Keras's own metrics are."""
    function = getattr(metric, "_fn", None)
    return not is_of_keras(type(metric).update_state) or not (function is None or is_of_keras(function))


def _of_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """The first data shard counts the rows of all; the states of the others stay as they began, zeros in the sum."""

    def update_state(*args: Any, **kwargs: Any) -> Any:
        here = frame()
        if here is None or here.rows is None or not here.world.data_axes:
            return original(*args, **kwargs)
        rows = here.rows
        with events.for_purpose("metrics"), torch.no_grad():
            args, kwargs = tree.map_structure(lambda x: _whole_rows(here, rows, x), (args, kwargs))
        return original(*args, **kwargs) if here.world.data_place(here.rank) == 0 else None

    return update_state


def _whole_rows(here: Frame, rows: Rows, x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.is_meta or not x.ndim or x.shape[0] != rows.local:
        return x
    whole = here.world.gather_rows(x.detach(), rows.total)
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        set_keras_mask(whole, here.world.gather_rows(mask, rows.total))
    return whole


def _by_share(metric: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A Mean that a train_step tells one number a step: a rank's number counts by its share of the rows. A loss is a
    contribution already, of which the sum is the loss of all rows."""

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        here = frame()
        given = isinstance(values, torch.Tensor) and not values.is_meta and values.ndim == 0 and sample_weight is None
        if here is None or here.rows is None or not here.world.data_axes or not given:
            return original(values, sample_weight=sample_weight)
        share = here.rows.share
        with torch.no_grad():
            if not losses.is_contribution(values):
                values = values * share if share else torch.zeros_like(values)
            metric.total.assign_add(values.detach())
            metric.count.assign_add(torch.as_tensor(share, dtype=torch.float32))
        return None

    return update_state


def _contributing(tracker: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A loss contribution L_r counts as L_r * total rows, over local rows: summed up, the global mean. Without
    weights every batch counts once."""

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        here = frame()
        if here is None or here.rows is None or not here.world.data_axes or values.is_meta:
            return original(values, sample_weight=sample_weight)
        shards = here.world.mesh.axis_size(here.world.data_axes)
        weight, count = (1.0, 1 / shards) if sample_weight is None else (here.rows.total, here.rows.local)
        with torch.no_grad():
            tracker.total.assign_add(values.detach() * weight)
            tracker.count.assign_add(torch.as_tensor(float(count), dtype=torch.float32))
        return None

    return update_state

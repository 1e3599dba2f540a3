"""Metrics: each rank sums up its own rows; a result is computed from the states summed over the data axes.

Keras declares the states of metrics `synchronization="on_read", aggregation="sum"`: this is that reading. All states of
a model are summed in one collective: after each step whose logs somebody reads, and at the end of each epoch. A metric
with an update_state that is not Keras's may keep another thing than sums: it is given the rows of all shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from keras.losses import Loss

from unidist import events
from unidist.keras import numbers, sessions
from unidist.keras.compat import Mean, Sum, Trainer, get_device, get_keras_mask, in_symbolic_scope, set_keras_mask, tree
from unidist.keras.interception import Hook, kept
from unidist.keras.known import is_of_keras
from unidist.keras.torch import devices
from unidist.keras.torch.context import Frame, Rows, frame
from unidist.keras.torch.rows import mixing, regions
from unidist.keras.torch.rows.parts import mapped, whole
from unidist.keras.torch.rows.rowparts import RowPart
from unidist.keras.torch.steps import losses
from unidist.keras.torch.values.variables import DistributedVariable

_originals: dict[str, Any] = {}
# An attribute of a tensor: it is a metric's result.
_RESULT = "_unidist_result"
# Functions of Keras's that take what they compare as it is: labels (rows,) and predictions (rows, 1) meet in all pairs.
_OF_PAIRS = ("hinge", "squared_hinge", "categorical_hinge", "kl_divergence", "poisson")


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


def logs_of_all(here: Frame, logs: Any) -> Any:
    """The logs of a step as one device has them. Numbers that are no metric's results, as of a train_step of the
    model's own, are of this rank's rows: contributions to a loss are summed, others are means by the shares of the
    rows. One all_reduce of scalars, where the ranks' may differ."""
    world = here.world
    if here.rows is None or not (world.data_axes or world.drifting) or not isinstance(logs, dict):
        return logs
    if here.sees_rows:
        return _of_the_first(here, mapped(whole, logs))
    own = _own_numbers(logs)
    numbers = [value for value in own.values() if _is_own_number(here, value)] + (here.numbers or [])
    if not own and not numbers:
        return logs
    share = here.rows.share
    with torch.no_grad(), events.for_purpose("logs"):
        parts = [_of_share(here, value, share).to(torch.float64) for value in own.values()]
        numbers = [number.detach().to(torch.float64) for number in numbers]
        squares = [number * number for number in numbers]
        sums = world.agreed(here, [*parts, *numbers, *squares], world.data_axes)
    totals, sums = sums[: len(parts)], sums[len(parts) :]
    here.tells_numbers |= _differ(here, sums[: len(numbers)], sums[len(numbers) :])
    return {**logs, **{name: total.to(own[name].dtype) for name, total in zip(own, totals, strict=True)}}


def _of_the_first(here: Frame, logs: dict[str, Any]) -> dict[str, Any]:
    """Logs that all ranks have computed alike, the same bits."""
    own = _own_numbers(logs)
    with torch.no_grad(), events.for_purpose("logs"):
        return {**logs, **dict(zip(own, here.world.agreed(here, list(own.values()), ()), strict=True))}


def _own_numbers(logs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in logs.items() if _is_of_own_rows(value)}


def _is_own_number(here: Frame, value: torch.Tensor) -> bool:
    """Whether a step of the user's own has computed a number by itself: not from losses, and no metric's result."""
    return here.tells_losses and not losses.is_contribution(value)


def _differ(here: Frame, sums: list[torch.Tensor], squares: list[torch.Tensor]) -> bool:
    """Whether numbers differ between the data shards, by their sums and those of their squares."""
    shards = here.world.mesh.axis_size(here.world.data_axes)
    apart = [
        bool((q / shards - (s / shards) ** 2).abs() > 1e-12 * q / shards) for s, q in zip(sums, squares, strict=True)
    ]
    return any(apart)


def _is_of_own_rows(value: Any) -> bool:
    is_number = isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()
    return is_number and not value.is_meta and not getattr(value, _RESULT, False)


def _merged(model: Any, here: Frame) -> Any:
    with here.reading(summed(here, model.metrics_variables)):
        return _originals["result"](model)


def _unmerged(model: Any, here: Frame) -> Any:
    own = [v for v in model.metrics_variables if isinstance(v, DistributedVariable)]
    with here.reading({id(v): v._storage.local(here) for v in own}):
        return _originals["result"](model)


def summed(here: Frame, variables: Iterable[Any]) -> dict[int, torch.Tensor]:
    """id -> value summed over the data axes, for those of the variables whose values ranks have in parts, or with other
    last bits: one collective a dtype."""
    own = [v for v in variables if isinstance(v, DistributedVariable) and id(v) not in here.overrides]
    apart = [v for v in own if v._storage.layout.partial or _drifts(here, v)]
    with events.for_purpose("metrics"):
        totals = here.world.agreed(here, [v._storage.local(here) for v in apart], here.world.data_axes)
    return {id(v): total for v, total in zip(apart, totals, strict=True)}


def _drifts(here: Frame, variable: Any) -> bool:
    """Whether ranks that compute the same may get other values of it, where nothing is summed."""
    if not here.world.drifting or here.world.data_axes:
        return False
    is_real: bool = variable._storage.leaf(here.rank).is_floating_point()
    return is_real


def adopt(metrics: Iterable[Any], loss_trackers: Iterable[Any]) -> None:
    """Makes a model's metrics merge on `result()`, and its loss trackers count contributions."""
    trackers = list(loss_trackers)
    for metric in metrics:
        for leaf in _leaves(metric):
            if "result" not in vars(leaf):
                object.__setattr__(leaf, "result", _merging(leaf, leaf.result))
                found, counts_whole = leaf.update_state, _counts_its_own_way(leaf)
                if counts_whole:
                    found = _of_all_rows(found)
                elif getattr(getattr(leaf, "_fn", None), "__name__", "") in _OF_PAIRS:
                    found = _of_all_rows_in_pairs(found)
                elif isinstance(leaf, Mean) and any(leaf is t for t in trackers):
                    found = _contributing(leaf, found)
                elif type(leaf).update_state is Mean.update_state:
                    found = _by_share(leaf, found)
                elif type(leaf).update_state is Sum.update_state:
                    found = _once(found)
                object.__setattr__(leaf, "update_state", _with_own_rows(found, counts_whole=counts_whole))
    for tracker in trackers:
        if isinstance(tracker, Mean) and "update_state" not in vars(tracker):
            object.__setattr__(tracker, "update_state", _with_own_rows(_contributing(tracker, tracker.update_state)))


def _leaves(metric: Any) -> list[Any]:
    inner = getattr(metric, "_metrics", [])
    return [metric, *[leaf for m in inner for leaf in _leaves(m)]]


def _merging(metric: Any, original: Callable[[], Any]) -> Callable[[], Any]:
    def result() -> Any:
        here = frame()
        if here is None:
            return original()
        with here.reading(summed(here, metric.variables)):
            found = tree.map_structure(_result, original())
        return found

    return result


def _result(value: Any) -> Any:
    """A result that is a variable is read here: behind the frame each read of it would be a collective."""
    value = value.value if isinstance(value, DistributedVariable) else value
    if isinstance(value, torch.Tensor):
        setattr(value, _RESULT, True)
    return value


def _counts_its_own_way(metric: Any) -> bool:
    """Whether its state may be another thing than a sum over rows, as those of Keras's own metrics are."""
    if not is_of_keras(type(metric).update_state):
        return True
    function = getattr(metric, "_fn", None)
    # A loss that counts as a metric gives one number for all of its rows.
    return isinstance(function, Loss) or not mixing.is_of_each_row(function, getattr(metric, "_fn_kwargs", {}))


def _with_own_rows(original: Callable[..., Any], *, counts_whole: bool = False) -> Callable[..., Any]:
    """Where the rows of all shards are in view, a metric is given this shard's. What is whole, and has another number
    of rows than the batch, is the same on all ranks, and the first data shard counts it; `counts_whole`: so is all."""

    def update_state(*args: Any, **kwargs: Any) -> Any:
        here = frame()
        if here is None or here.region is None or here.rows is None:
            return original(*args, **kwargs)
        tensors = [x for x in tree.flatten((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim]
        are_cut = any(isinstance(x, RowPart) for x in tensors)
        if tensors and (counts_whole or not (are_cut or any(x.shape[0] == here.rows.total for x in tensors))):
            with events.for_purpose("metrics"), torch.no_grad():
                args, kwargs = mapped(whole, args), mapped(whole, kwargs)
            with here.looking(None):
                return _by_first(here, original, args, kwargs)
        named = list(kwargs)
        told = functools.partial(_called, original, named)
        return regions.with_own_rows(here, told, *args, *(kwargs[name] for name in named))

    return update_state


def _called(original: Callable[..., Any], named: list[str], *given: Any) -> Any:
    plain = len(given) - len(named)
    return original(*given[:plain], **dict(zip(named, given[plain:], strict=True)))


def _of_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """The first data shard counts the rows of all; the states of the others stay as they began, zeros in the sum."""

    def update_state(*args: Any, **kwargs: Any) -> Any:
        here = frame()
        if here is None or here.rows is None or not here.world.data_axes:
            return original(*args, **kwargs)
        rows = here.rows
        if here.tells_losses and not here.gathered_loss and _are_of_another_batch(rows, args, kwargs):
            raise regions.LooksAtRowsError(
                "a metric with an update_state of its own was given rows that the model's own step has made. Compile "
                "the model with jit_compile=False"
            )
        with events.for_purpose("metrics"), torch.no_grad():
            args, kwargs = tree.map_structure(lambda x: _whole_rows(here, rows, x), (args, kwargs))
        return _by_first(here, original, args, kwargs)

    return update_state


def _of_all_rows_in_pairs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where labels and predictions differ in their number of dims, a row is compared with those of others."""
    of_all_rows = _of_all_rows(original)

    def update_state(y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        are_pairs = len(getattr(y_true, "shape", ())) != len(getattr(y_pred, "shape", ()))
        return (of_all_rows if are_pairs else original)(y_true, y_pred, *args, **kwargs)

    return update_state


def _by_first(here: Frame, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with here.on_wholes():
        return original(*args, **kwargs) if here.world.data_place(here.rank) == 0 else None


def _are_of_another_batch(rows: Rows, *values: Any) -> bool:
    tensors = [x for x in tree.flatten(values) if isinstance(x, torch.Tensor) and x.ndim]
    return bool(tensors) and not any(x.shape[0] == rows.local for x in tensors)


def _whole_rows(here: Frame, rows: Rows, x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.shape[:1] == (rows.local,):  # as train_on_batch was given it
        return here.world.gather_rows(torch.as_tensor(x, device=get_device()), rows.total).numpy(force=True)
    if not isinstance(x, torch.Tensor) or x.is_meta or not x.ndim or x.shape[0] != rows.local:
        return x
    whole = here.world.gather_rows(x.detach(), rows.total)
    mask = get_keras_mask(x)
    if mask is not None:
        set_keras_mask(whole, here.world.gather_rows(mask, rows.total))
    return whole


def _by_share(metric: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A Mean that a train_step gives one number a step: a rank's number counts by its share of the rows. A contribution
    to a loss is a share already."""

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        here = frame()
        given = isinstance(values, torch.Tensor) and not values.is_meta and values.ndim == 0 and sample_weight is None
        if here is None or here.rows is None or not here.world.data_axes or not given:
            return original(values, sample_weight=sample_weight)
        share = here.rows.share
        if here.numbers is not None and here.region is None and _is_own_number(here, values):
            here.numbers.append(values.detach())
        with torch.no_grad():
            metric.total.assign_add(_of_share(here, values, share).detach())
            metric.count.assign_add(devices.filled(share, metric.count.value))
        return None

    return update_state


def _once(original: Callable[..., Any]) -> Callable[..., Any]:
    """A Sum adds up what the ranks give it of their rows. A number that all ranks have, as a loss of all rows, counts
    once."""

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        here = frame()
        is_given = here is not None and here.tells_losses and isinstance(values, torch.Tensor) and not values.ndim
        if here is None or here.rows is None or not is_given or not _is_of_all(here, values):
            return original(values, sample_weight=sample_weight)
        return original(_of_share(here, values, here.rows.share), sample_weight=sample_weight)

    return update_state


def _is_of_all(here: Frame, value: torch.Tensor) -> bool:
    """Whether a number in a step of the user's own is the same on all ranks. A collective, if that is not known."""
    if here.sees_rows or value.is_meta or losses.is_contribution(value):
        return True
    number = value.detach().to(torch.float64)
    with events.for_purpose("logs"):
        total, squares = here.world.agreed(here, [number, number * number], here.world.data_axes)
    differs = _differ(here, [total], [squares])
    here.tells_numbers |= differs
    return not differs


def _of_share(here: Frame, value: torch.Tensor, share: float) -> torch.Tensor:
    """What a number of this rank's is of that of all rows."""
    if not here.tells_losses and losses.is_contribution(value):
        return value
    return numbers.by_share(value, share)  # type: ignore[no-any-return]


def _contributing(tracker: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A loss contribution L_r counts as L_r * total rows, over local rows: summed up, the global mean. Without
    weights every batch counts once. A loss of all rows counts on each rank as the rank does."""

    def update_state(values: Any, sample_weight: Any = None) -> Any:
        here = frame()
        if here is None or here.rows is None or not here.world.data_axes or values.is_meta:
            return original(values, sample_weight=sample_weight)
        shards, rows = here.world.mesh.axis_size(here.world.data_axes), here.rows
        given = 1.0 if sample_weight is None else sample_weight
        # Keras's own steps give the number of the batch's rows.
        is_of_rows = given is sample_weight and not torch.is_tensor(given) and given in (rows.local, rows.total)
        count, weight = (rows.local, rows.total) if is_of_rows else (given / shards, given)
        with torch.no_grad():
            tracker.total.assign_add(values.detach() * (count if here.tells_losses else weight))
            tracker.count.assign_add(torch.zeros_like(tracker.count.value) + count)
        return None

    return update_state

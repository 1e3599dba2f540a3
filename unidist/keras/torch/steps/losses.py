"""Losses with global denominators: what a rank computes is its contribution, and contributions add up to the loss.

A local mean differs from the global one by its denominators alone (element counts, summed weights, valid mask
entries). Those few scalars are made global here; then every built-in loss is exact for masks, weights and ragged
batches, and gradients are summed, not averaged.
"""

from __future__ import annotations

import contextlib
import functools
import re
from math import prod
from typing import Any, cast

import torch

from unidist import events
from unidist.backends import registry
from unidist.errors import CapabilityError
from unidist.keras import numbers
from unidist.keras.compat import Layer, Trainer, loss_module, ops
from unidist.keras.interception import Hook, kept
from unidist.keras.torch import devices
from unidist.keras.torch.context import Frame, Rows, frame
from unidist.keras.torch.moving import WHOLE, fanned, move, partial
from unidist.keras.torch.rows import mixing, own_rows, regions
from unidist.keras.torch.rows.rowparts import anchored

_originals: dict[str, Any] = {}


def hooks() -> tuple[Hook, ...]:
    """The module of losses, Layer.losses and Trainer, and torch's backward; outside of a training frame they are as
    before."""
    why = "losses are means over all rows"
    return (
        Hook(torch.autograd, "backward", kept(_originals, "backward", _backward), "gradients of own losses"),
        Hook(loss_module.Loss, "__call__", kept(_originals, "call", _loss_call), "losses that mix rows"),
        Hook(loss_module, "reduce_weighted_values", kept(_originals, "reduce_weighted", _reduce_weighted), why),
        Hook(loss_module, "reduce_values", kept(_originals, "reduce_values", reduce_values), why),
        Hook(loss_module, "apply_mask", kept(_originals, "apply_mask", apply_mask), why),
        Hook(Layer, "losses", _adding, why),
        Hook(Trainer, "_aggregate_additional_loss", kept(_originals, "additional", _aggregate_additional_loss), why),
    )


def _adding(original: property) -> property:
    _originals["losses"] = original
    return property(_added_losses, doc=original.__doc__)


def _needs_denominators(here: Frame | None) -> bool:
    return here is not None and here.rows is not None and not here.gathered_loss and bool(here.world.data_axes)


def global_sum(here: Frame, value: torch.Tensor) -> torch.Tensor:
    with events.for_purpose("loss denominators"):
        return here.world.sum_over(value, here.world.data_axes)


def global_count(here: Frame, rows: Rows, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """The number of elements over all data shards of a tensor with one entry a row, or any other.

    With even shards every rank holds as many, so the count needs no communication; the choice depends on what all
    ranks know alike.
    """
    local = prod(shape)
    if rows.even:
        return devices.filled(local * here.world.mesh.axis_size(here.world.data_axes), like)
    return global_sum(here, devices.filled(local, like))


def _loss_call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    here = frame()
    if here is not None and here.sees_rows and here.region is not None:
        return regions.with_own_rows(here, functools.partial(_loss_call, self), y_true, y_pred, sample_weight)
    if _needs_denominators(here):
        mixing.give_region_to_loss(self)
    return _originals["call"](self, y_true, y_pred, sample_weight)


def _reduce_weighted(values: Any, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
    """One number for all rows that each row weighs is one for each row. Keras takes the weight of a single row for a
    number too: it does where the batch has no other, and not where a rank has one of several."""
    here = frame()
    if _needs_denominators(here) and len(getattr(sample_weight, "shape", ())) == 1:
        _, rows = _known(here)
        values = ops.convert_to_tensor(values)
        if values.ndim == 0 and rows.total > 1:
            values = ops.broadcast_to(values, tuple(sample_weight.shape))
        elif values.ndim == 0 and rows.local == 0:
            sample_weight = None
    return _originals["reduce_weighted"](values, sample_weight, *args, **kwargs)


def reduce_values(values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size") -> Any:
    """Keras's reduction, divided by the global denominator. What is not reduced is a loss where it is one number."""
    here = frame()
    is_of_rows = reduction in (None, "none") and tuple(values.shape) != ()
    if not _needs_denominators(here) or is_of_rows or values.is_meta:
        return _originals["reduce_values"](values, sample_weight, reduction)
    known, rows = _known(here)
    known.exact_loss = True
    return told(known, [_contribution(known, rows, values, sample_weight, reduction)])[0]


def told(here: Frame, contributions: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a step gets of losses: this rank's contributions. A step of the model's own, which may look at them, gets
    the losses themselves: P -> I over the data axes by one all_reduce of scalars, whose adjoint sends nothing; P -> F
    where it sees the rows of all shards, and may compute anything with them."""
    if not here.tells_losses or not contributions:
        return [marked(part) for part in contributions]
    row = _stacked(contributions)
    axes = here.world.data_axes
    if here.sees_rows:
        row = anchored(row)
    with events.for_purpose("losses"):
        whole = move(here, row, tuple(row.shape), partial(axes), fanned(axes) if here.sees_rows else WHOLE)
    return [marked(x.to(part.dtype)) for x, part in zip(whole.unbind(), contributions, strict=True)]


def marked(loss: torch.Tensor) -> torch.Tensor:
    """Notes that a number is a loss: of its gradient this rank has its contribution."""
    setattr(loss, _MARK, True)
    if loss.grad_fn is not None:
        _notes(loss.grad_fn)[_MARK] = True
    return loss


# An attribute of a tensor, or of the node that made it: it is a loss, or what a rank contributes to one.
_MARK = "_unidist_contribution"
# Losses are summed, weighted and scaled: a few nodes stand between them and what a metric is given.
_NODES_BETWEEN = 64


def _notes(node: Any) -> dict[Any, Any]:
    # A dict, though torch types it as a method.
    return cast("dict[Any, Any]", node.metadata)


def is_contribution(value: torch.Tensor) -> bool:
    """Whether a number is what this rank contributes to a loss, or was computed from that."""
    if getattr(value, _MARK, False):
        return True
    nodes = [value.grad_fn] if value.grad_fn is not None else []
    for _ in range(_NODES_BETWEEN):
        if not nodes:
            return False
        node = nodes.pop(0)
        if _notes(node).get(_MARK):
            return True
        nodes += [following for following, _ in node.next_functions if following is not None]
    return False


# What keeps a sum of contributions one: the backwards of linear functions, as torch names them.
_LINEAR = re.compile(
    r"(Add|Sub|Rsub|Mul|Div|Neg|Sum|Mean|Stack|Cat|Select|Slice|Unbind|Unsqueeze|Squeeze|View|UnsafeView|Reshape|Expand"
    r"|ToCopy|Clone|Alias|Where)Backward\d*"
)


def is_own(root: torch.Tensor) -> bool:
    """Whether something is in a loss that is no contribution: it was computed from this rank's rows alone, or is the
    same on all ranks and would count on each."""
    nodes = [root.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or _notes(node).get(_MARK):
            continue
        behind = [following for following, _ in node.next_functions if following is not None]
        is_product = node.name().startswith(("Mul", "Div")) and len(behind) > 1
        if is_product or not behind or not _LINEAR.fullmatch(node.name()):
            return True
        nodes += behind
    return False


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """A loss is looked at where backward begins."""
    here = own_rows.frame_of_backward()
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if here is not None and here.sees_rows and not here.is_making_gradients:
        here.exact_loss = True
        if here.region is not None and any(map(is_own, roots)):
            here.region.look()
        grads = list(grad_tensors) if isinstance(grad_tensors, (list, tuple)) else [grad_tensors] * len(roots)
        ends = [own_rows.begun(here, *end) for end in zip(roots, grads, strict=True)]
        tensors, grad_tensors = [root for root, _ in ends], [grad for _, grad in ends]
    elif here is not None and (here.exact_loss or here.own_step):
        check_roots(here, roots)
    if here is None and not any(t.requires_grad for t in roots) and _is_simulated():
        raise CapabilityError(
            "backward was called outside of fit on what has no gradient: in the simulator, whose ranks work only "
            "inside fit and train_on_batch, variables that are stored as shards have none there: put the loop's body "
            "into the model's train_step"
        )
    with here.making_gradients() if here is not None else contextlib.nullcontext():
        _originals["backward"](tensors, grad_tensors, *args, **kwargs)


def check_roots(here: Frame, roots: list[torch.Tensor]) -> None:
    """To be called where a gradient begins.

    Raises:
        LooksAtRowsError: what it is asked of is not, or not alone, a loss of all rows.
    """
    if here.sees_rows or here.is_making_gradients:
        return  # what rematerialization starts within begins nowhere
    if _is_cut(here) and (not here.exact_loss or any(map(is_own, roots))):
        raise regions.LooksAtRowsError(OWN_LOSS)


def _is_cut(here: Frame) -> bool:
    return _needs_denominators(here) and here.world.mesh.axis_size(here.world.data_axes) > 1


def _is_simulated() -> bool:
    return registry.in_use().virtual


OWN_LOSS = (
    "train_step computed its loss, or a part of it, by itself, and as a program it knows this device's rows alone. "
    "Compile the model with jit_compile=False, or compute the loss with self.compute_loss(x=x, y=y, y_pred=y_pred), of "
    "your own where Keras's will not do, and add what self.losses has"
)


def _contribution(known: Frame, rows: Rows, values: Any, sample_weight: Any, reduction: str | None) -> Any:
    if tuple(values.shape) == ():
        # A loss function that gave a scalar: a mean over its rows, so it counts by them.
        return numbers.by_share(values, rows.share)
    loss = ops.sum(values)
    if reduction not in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
        return loss
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        divisor = global_sum(known, ops.cast(ops.sum(sample_weight), loss.dtype))
    else:
        divisor = global_count(known, rows, tuple(values.shape), loss)
    return ops.divide_no_nan(loss, divisor)


def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: str | None) -> Any:
    """Keras's masking, where total/valid of the mean count all data shards."""
    here = frame()
    if (
        mask is None
        or not _needs_denominators(here)
        or reduction not in ("mean", "sum_over_batch_size")
        or mask.is_meta
    ):
        return _originals["apply_mask"](sample_weight, mask, dtype, reduction)
    known, _ = _known(here)
    float_mask = ops.cast(mask, dtype)
    counts = torch.stack([devices.filled(mask.numel(), float_mask), float_mask.sum()])
    total, valid = global_sum(known, counts)
    weights = float_mask * ops.divide_no_nan(total, valid)
    if sample_weight is None:
        return weights
    weights, sample_weight = loss_module.squeeze_or_expand_to_same_rank(weights, ops.cast(sample_weight, dtype))
    # In place, as Keras does: weighted metrics of one device see these weights too.
    sample_weight *= weights
    return sample_weight


def _added_losses(self: Any) -> list[Any]:
    """add_loss, activity and weight regularizers: means over the rows (or independent of them), so each shard
    contributes by its share of the rows; the shares sum to one. A loss that is given the rows of all shards is given
    the sums of these contributions too."""
    found: list[Any] = _originals["losses"].fget(self)
    here = frame()
    if here is None or here.rows is None or not here.world.data_axes or not found:
        return found
    own = [numbers.by_share(ops.convert_to_tensor(value), here.rows.share) for value in found]
    return _over_all_shards(here, own) if here.gathered_loss else told(here, own)


def _over_all_shards(here: Frame, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sums over the data shards, the same on each; gradients come back summed. One all_gather of scalars."""
    # On a shard without rows, where nothing depends on the weights, backward must come to the collective all the same.
    row = anchored(_stacked(values))
    with events.for_purpose("added losses"):
        (rows,) = here.world.of_shards([row])
    return [total.to(value.dtype) for total, value in zip(rows.sum(0).unbind(), values, strict=True)]


def _aggregate_additional_loss(self: Any, loss: Any) -> Any:
    """What _added_losses gives is exact, where it is all that a model loses too."""
    here = frame()
    if here is not None:
        here.exact_loss = True
    return _originals["additional"](self, loss)


def _stacked(numbers: list[torch.Tensor]) -> torch.Tensor:
    """In the widest of their dtypes, and at least in float32."""
    dtype = functools.reduce(torch.promote_types, (number.dtype for number in numbers), torch.float32)
    return torch.stack([number.to(dtype) for number in numbers])


def _known(here: Frame | None) -> tuple[Frame, Rows]:
    if here is None or here.rows is None:
        raise RuntimeError("a loss needs a frame with rows here")
    return here, here.rows

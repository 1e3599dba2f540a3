"""A region: a call with the rows of all shards in view. What has rows enters it as RowParts, and leaves as own rows.

What is known to treat each row alone is called outside of the region again, with this shard's rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from unidist.errors import CapabilityError
from unidist.keras.calls import Call
from unidist.keras.compat import get_device, get_keras_mask, set_keras_mask
from unidist.keras.torch.context import Frame, Rows
from unidist.keras.torch.rows.handling import HANDLERS
from unidist.keras.torch.rows.parts import mapped
from unidist.keras.torch.rows.rowparts import RowPart, own_rows

# Set here, where RowParts are made: the handlers make some themselves.
RowPart.HANDLERS = HANDLERS

# On a tensor: it has no rows, whatever its first dim.
_ROWLESS = "_unidist_rowless"


class LooksAtRowsError(CapabilityError):
    """A step of the user's own computes with rows by itself. Not seen outside, if it can begin again (own_rows.py)."""


@dataclass
class Region:
    """A call with the rows of all shards in view.

    Attributes:
        name: of the layer, operation or loss.
        mixes: whether it has looked at the rows of other shards.
        is_apart: it is given other rows than the batch's, which the step has made of this shard's.
        is_step: it is a step of the user's own.
    """

    name: str
    mixes: bool = False
    is_apart: bool = False
    is_step: bool = False

    @property
    def why(self) -> str:
        return f"rows of {self.name}"

    def look(self) -> None:
        """It looks at the rows of other shards.

        Raises:
            LooksAtRowsError: they are not known.
        """
        if self.is_apart:
            raise LooksAtRowsError(
                f"{self.name!r} looks at several rows of a batch that the model's own step has made of this device's "
                "rows. Compile the model with jit_compile=False, and let what it takes have the rows of the batch"
            )
        self.mixes = True

    def draw(self) -> None:
        """It draws random numbers: a layer those of all shards from now on. In a step each device may draw its own."""
        if not self.is_step:
            self.look()


def can_begin(frame: Frame) -> bool:
    """Not where a few rows prove something else, or the whole batch is there already."""
    return (
        bool(frame.world.data_axes)
        and frame.trial is None
        and not frame.wide
        and not frame.gathered_loss
        and not frame.is_tracing
        and str(get_device()) != "meta"
    )


# calls ----------------------------------------------------------------------------------------------------------------


def on_locals(frame: Frame, call: Call, args: Any, kwargs: Any) -> Any:
    """A call with this shard's rows of what has rows, outside of the region; its results have rows again."""
    if frame.region is None or frame.rows is None:
        return call(*args, **kwargs)  # there are no RowParts
    rows, parts = frame.rows, _of_kind(RowPart, args, kwargs)
    dims = {x.ndim for x in parts}
    if not parts and frame.sees_rows and _have_all_rows(rows, args, kwargs):
        dims = {x.ndim for x in _of_kind(torch.Tensor, args, kwargs)}
    if not dims:
        # The same on all ranks, and so are the random numbers.
        with frame.looking(None), frame.seeds_at(0):
            return call(*args, **kwargs)
    first = parts[0] if parts else _of_the_batch(frame, rows)
    own = sum(first.counts) if first.part is None else first.part.shape[0]
    local = _once(functools.partial(_local, first, dims))
    with frame.looking(None), _masked_parts(local, (args, kwargs)):
        out = call(*mapped(local, args), **mapped(local, kwargs))
    return mapped(lambda x: RowPart.behind_each_other(frame, x, first.batches) if _has_as_many(x, own) else x, out)


def _once(local: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same own rows of the same RowPart: what is set on them stays."""
    known: dict[int, Any] = {}

    def once(x: Any) -> Any:
        if not isinstance(x, RowPart):
            return local(x)
        if id(x) not in known:
            known[id(x)] = local(x)
        return known[id(x)]

    return once


@contextlib.contextmanager
def _masked_parts(local: Callable[[Any], Any], given: Any) -> Iterator[None]:
    """This shard's rows have those of the masks. A mask that the call takes off them is off: attention does so."""
    masked = [(x, mask) for x in _of_kind(RowPart, given) if (mask := get_keras_mask(x)) is not None]
    for x, mask in masked:
        set_keras_mask(local(x), local(mask))
    yield
    for x, _ in masked:
        if get_keras_mask(local(x)) is None:
            set_keras_mask(x, None)


def with_own_rows(frame: Frame, call: Call, *args: Any) -> Any:
    """A call of arguments that all have rows with this shard's rows, in a step that sees those of all shards. Of wholes
    that have other numbers of rows, as two batches behind each other, it is called as on one device."""
    rows = frame.rows
    parts = _of_kind(RowPart, *args)
    if rows is None or not (parts or _have_all_rows(rows, args)):
        with frame.looking(None), frame.on_wholes():
            return call(*args)
    first = parts[0] if parts else _of_the_batch(frame, rows)
    return on_locals(frame, call, mapped(lambda x: _cut_alike(first, x), args), {})


def are_row_parts(*values: Any) -> bool:
    """Whether there is a RowPart among the leaves."""
    return bool(_of_kind(RowPart, *values))


# tensors --------------------------------------------------------------------------------------------------------------


def as_row_part(frame: Frame, rows: Rows, x: Any, constants: set[int]) -> Any:
    """Outside of a region a tensor with as many rows as this shard has is this shard's part."""
    is_own = may_have_rows(x, constants) and x.shape[0] == rows.local
    return RowPart.of(frame, x, rows.total) if is_own else x


def may_have_rows(x: Any, constants: set[int]) -> bool:
    is_other = id(x) in constants or isinstance(x, torch.nn.Parameter) or getattr(x, _ROWLESS, False)
    return isinstance(x, torch.Tensor) and x.ndim > 0 and not is_other


def rows_of_its_own(rows: Rows, constants: set[int], *values: Any) -> int:
    """How many rows a batch has that is not the step's; 0: it is the step's, or there is none."""
    counts: list[int] = []
    mapped(lambda x: counts.append(x.shape[0]) if may_have_rows(x, constants) else None, values)
    return 0 if not counts or rows.local in counts else max(counts)


def as_local(frame: Frame, rows: Rows, x: Any, has_rows: bool | None = None) -> Any:
    """What leaves a region: this shard's rows of what has rows. None: what has as many as the batch has them."""
    if isinstance(x, RowPart) and x.part is not None and x.batches == (rows.total,):
        return _masked(frame, rows, x, x.part)
    whole = x.whole() if isinstance(x, RowPart) else x
    if not isinstance(whole, torch.Tensor) or not whole.ndim:
        return whole
    if whole.shape[0] == rows.total and has_rows is not False:
        return _masked(frame, rows, x, own_rows(frame, whole))
    setattr(whole, _ROWLESS, True)
    return whole


def _masked(frame: Frame, rows: Rows, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """This shard's rows, with those of the mask that Keras keeps on a tensor."""
    mask = get_keras_mask(x)
    if mask is not None:
        set_keras_mask(own, as_local(frame, rows, mask))
    return own


def _local(first: RowPart, dims: set[int], x: Any) -> Any:
    """This shard's rows of what has rows: of RowParts, and of a whole tensor beside them that has as many dims."""
    if isinstance(x, RowPart):
        return x.part if x.part is not None else x.own(x.whole())
    is_whole = isinstance(x, torch.Tensor) and x.ndim in dims and x.shape[0] == first.shape[0]
    return first.own(x) if is_whole and not isinstance(x, torch.nn.Parameter) else x


def _of_the_batch(frame: Frame, rows: Rows) -> RowPart:
    """One that stands for the rows of the batch."""
    return RowPart.of(frame, torch.empty(rows.local), rows.total)


def _cut_alike(first: RowPart, x: Any) -> Any:
    is_whole = isinstance(x, torch.Tensor) and not isinstance(x, RowPart) and _has_as_many(x, first.shape[0])
    return RowPart.behind_each_other(first.frame, first.own(x), first.batches) if is_whole else x


def _of_kind(kind: type[torch.Tensor], *values: Any) -> list[Any]:
    """The tensors of a kind among the leaves, but for those without dims."""
    found: list[Any] = []
    mapped(lambda x: found.append(x) if isinstance(x, kind) and x.ndim else None, values)
    return found


def _have_all_rows(rows: Rows, *values: Any) -> bool:
    """Whether all tensors that have dims have a row for each of the batch."""
    tensors = _of_kind(torch.Tensor, *values)
    return bool(tensors) and all(x.shape[0] == rows.total for x in tensors)


def _has_as_many(x: Any, rows: int) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] == rows

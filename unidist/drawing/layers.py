"""Layers: what a graph of a model shows of each, and the folding of blocks that are alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from unidist.algebra import Layout
from unidist.ledger import Ledger
from unidist.planner.plan import Plan, PlanRow

# kind -> (class of its colour, what the legend says)
KINDS = {
    "column": ("c0", "cut by its outputs"),
    "row": ("c1", "cut by its inputs"),
    "table": ("c3", "a table, cut by its entries or features"),
    "gathered": ("c6", "cut, and gathered for each call"),
    "cut": ("c5", "cut, as its layout says"),
    "rests": ("c2", "rests in parts over the data axes"),
    "whole": ("gr", "replicated"),
}
_OF_REASONS = {
    "column": "column",
    "convolution": "gathered",
    "row": "row",
    "vocabulary": "table",
    "features": "table",
    "gathered": "gathered",
}
# Bytes of a state of random numbers, and of less.
_SMALL = 16
_NUMBERS = re.compile(r"_?\d+")


@dataclass(frozen=True, slots=True)
class Sent:
    """Collectives of a layer in a step: how often, and how many bytes a rank sends in all of them.

    `purpose`: what they are for where it is no layer.
    """

    op: str
    axes: tuple[str, ...]
    count: int
    bytes: Fraction
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class Layer:
    """Holds what is drawn of a layer.

    Attributes:
        kind: one of KINDS.
        detail: its largest variable's shape and layout.
        held, whole: bytes on the device that holds most, and of all variables.
        why: why it is laid out so.
        pair: (number of its pair, how far its pair's last layer is behind it), where it is in one.
    """

    path: str
    kind: str
    detail: str
    held: int
    whole: int
    why: str = ""
    sent: tuple[Sent, ...] = ()
    pair: tuple[int, int] | None = None

    @property
    def likeness(self) -> tuple[object, ...]:
        """The values that two layers have in common which are drawn once."""
        behind = None if self.pair is None else self.pair[1]
        return _NUMBERS.sub("", self.path), self.kind, self.detail, self.held, self.whole, self.sent, behind


class _Variable(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bytes_per_device(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Fold:
    """Layers that follow each other, and how often they do."""

    layers: tuple[Layer, ...]
    times: int = 1


def of_plan(plan: Plan) -> tuple[list[Layer], list[Sent]]:
    """Returns a plan's layers in the model's order, with what they send; and what no layer sends.

    The latter are gradients' sums and the like.
    """
    grouped: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        grouped.setdefault(_owner(row.path), []).append(row)
    of_layers, rest = _by_layer(plan.predicted, grouped)
    made = [_of_rows(path, rows, of_layers.get(path, ())) for path, rows in grouped.items()]
    return _paired(_small_last(made), plan.pairs), rest


def of_description(
    rows: Sequence[_Variable], layouts: Sequence[Layout | None], whole: Sequence[int], why: Mapping[str, str]
) -> list[Layer]:
    """The layers of a model as they are: rows of `describe`, of weights alone."""
    grouped: dict[str, list[int]] = {}
    for k, row in enumerate(rows):
        grouped.setdefault(_owner(row.path), []).append(k)
    made = []
    for path, members in grouped.items():
        largest = max(members, key=lambda k: whole[k])
        reason = why.get(path, "")
        kind = _kind(reason.partition(",")[0].partition(":")[0], layouts[largest])
        detail = _detail(rows[largest].path, rows[largest].shape, layouts[largest])
        made.append(
            Layer(
                path,
                kind,
                detail,
                sum(rows[k].bytes_per_device for k in members),
                sum(whole[k] for k in members),
                reason,
            )
        )
    return _small_last(made)


def _small_last(layers: list[Layer]) -> list[Layer]:
    """Puts states of random numbers and counters into one line behind all layers.

    They would stand between blocks.
    """
    small = [layer for layer in layers if layer.kind == "whole" and not layer.sent and layer.whole <= _SMALL]
    if len(small) < 2:
        return layers
    held, whole = (sum(getattr(layer, name) for layer in small) for name in ("held", "whole"))
    line = Layer(f"{len(small)} states of a few bytes", "whole", ", ".join(layer.path for layer in small), held, whole)
    return [*(layer for layer in layers if layer not in small), line]


def _owner(variable: str) -> str:
    return variable.rpartition("/")[0] or variable


def _by_layer(ledger: Ledger, grouped: Mapping[str, object]) -> tuple[dict[str, tuple[Sent, ...]], list[Sent]]:
    found: dict[str, dict[tuple[str, ...], Sent]] = {}
    for event in ledger.events:
        place = event.purpose if event.purpose in grouped else _owner(event.purpose)
        owner, purpose = (place, "") if place in grouped else ("", event.purpose)
        mine, key = found.setdefault(owner, {}), (purpose, event.op, *event.axes)
        so_far = mine.get(key, Sent(event.op, event.axes, 0, Fraction(0), purpose))
        mine[key] = replace(so_far, count=so_far.count + 1, bytes=so_far.bytes + event.bytes)
    rest = list(found.pop("", {}).values())
    return {path: tuple(sent.values()) for path, sent in found.items()}, rest


def _of_rows(path: str, rows: Sequence[PlanRow], sent: tuple[Sent, ...]) -> Layer:
    largest = max(rows, key=lambda row: row.bytes)
    heading = largest.reason.partition(":")[0].partition(",")[0]
    return Layer(
        path=path,
        kind=_kind(heading, largest.layout, rests_in_parts=largest.layouts.storage != largest.layouts.compute),
        detail=_detail(largest.path, largest.shape, largest.layout),
        held=sum(row.bytes_per_device for row in rows),
        whole=sum(row.bytes for row in rows),
        why=largest.reason,
        sent=sent,
    )


def _kind(heading: str, layout: Layout | None, rests_in_parts: bool = False) -> str:
    if layout is None or not layout.dims:
        return "whole"
    if (known := heading.partition(" ")[0]) in _OF_REASONS:
        return _OF_REASONS[known]
    return "rests" if rests_in_parts and heading.startswith("replicated") else "cut"


def _detail(path: str, shape: tuple[int, ...], layout: Layout | None) -> str:
    return f"{path.rpartition('/')[2]} {shape} {'' if layout is None else layout.in_words}".rstrip()


def _paired(layers: list[Layer], pairs: Sequence[tuple[str, ...]]) -> list[Layer]:
    place = {layer.path: k for k, layer in enumerate(layers)}
    out = list(layers)
    for number, names in enumerate(pairs):
        members = [place[name] for name in names if name in place]
        for k in members if len(members) > 1 else ():
            out[k] = replace(out[k], pair=(number, max(members) - k))
    return out


def folded(layers: Sequence[Layer]) -> list[Fold]:
    """Layers with blocks that are alike and follow each other as one block each, the largest gains first.

    Example:
        >>> [(fold.times, [layer.path for layer in fold.layers]) for fold in folded(
        ...     [Layer(path, "whole", "", 4, 4) for path in ("in", "a_1", "b_1", "a_2", "b_2", "a_3", "b_3", "out")])]
        [(1, ['in']), (3, ['a_1', 'b_1']), (1, ['out'])]
    """
    kinds: dict[tuple[object, ...], int] = {}
    marks = [kinds.setdefault(layer.likeness, len(kinds)) for layer in layers]
    found = max((_repeats(marks, begin) for begin in range(len(marks))), key=lambda one: one.gain, default=None)
    if found is None or not found.gain:
        return [Fold(tuple(layers))] if layers else []
    end = found.begin + found.length * found.times
    block = Fold(tuple(layers[found.begin : found.begin + found.length]), found.times)
    return [*folded(layers[: found.begin]), block, *folded(layers[end:])]


@dataclass(frozen=True, slots=True)
class _Repeated:
    begin: int
    length: int = 0
    times: int = 1

    @property
    def gain(self) -> int:
        return (self.times - 1) * self.length


def _repeats(marks: Sequence[int], begin: int) -> _Repeated:
    """Returns the block that begins there, repeats, and saves most.

    A single layer needs three of its kind.
    """
    best = _Repeated(begin)
    for length in range(1, (len(marks) - begin) // 2 + 1):
        if marks[begin] != marks[begin + length]:
            continue
        times, block = 1, marks[begin : begin + length]
        while marks[begin + times * length : begin + (times + 1) * length] == block:
            times += 1
        found = _Repeated(begin, length, times)
        if times > (2 if length == 1 else 1) and found.gain > best.gain:
            best = found
    return best

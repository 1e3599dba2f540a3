"""Verdicts: what the proof of pairs found of each column and row layer, with its reason, alike on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from unidist.algebra import Layout, Sharding
from unidist.keras.layers import more_than_its_kernel
from unidist.keras.telling import listed
from unidist.keras.torch.context import Frame
from unidist.keras.torch.tensor_parallel.rules import Rule

# Of a reason that one rank sends to the others.
_BYTES = 240
KINDS = {"column": "its outputs stay cut", "row": "its inputs come cut"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the proof found of one layer.

    Attributes:
        path: the layer's.
        kind: "column" or "row".
        partners: paths of the layers that it is paired with.
        reason: why it is paired with none; "" where it is.

    Example:
        >>> print(Verdict("up", "column", ("down",)), Verdict("down", "row", ("up", "gate")), sep="; ")
        column, paired with 'down'; row, takes shards of 'up' and 'gate'
        >>> print(Verdict("head", "column", reason="its outputs reach the outputs of the model"))
        column, gathered: its outputs reach the outputs of the model
    """

    path: str
    kind: str
    partners: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if not self.partners:
            return f"{self.kind}, gathered: {self.reason}"
        names = listed(map(repr, self.partners))
        return f"column, paired with {names}" if self.kind == "column" else f"row, takes shards of {names}"


def told(rule: Rule, verdict: Verdict | None) -> str:
    """What a layer with cut weights does, in a sentence; without a verdict, before the proof."""
    if more := more_than_its_kernel(rule.layer):
        return f"gathered for each call: it {more}"
    if rule.kind == "gather":
        return f"gathered for each call: {rule.reason}"
    if rule.kind == "vocabulary":
        return "vocabulary: each device looks up the entries that it holds"
    if verdict is None and (reason := unfit(rule)):
        verdict = Verdict(rule.name, rule.kind, reason=reason)
    return f"{rule.kind}: whether {KINDS[rule.kind]} is proven in the first step" if verdict is None else str(verdict)


def unfit(rule: Rule) -> str:
    """What hinders every pair of a layer; "" where nothing does. In a pair all shards are of one size (all ranks then
    see alike whether they fit), and nothing else looks at them."""
    layer = rule.layer
    if more := more_than_its_kernel(layer):
        return f"it {more}"
    if not hasattr(layer, "_kernel"):
        return "it is a table, whose features are joined"
    if layer.activity_regularizer is not None:
        return "it has an activity regularizer"
    if not rule.pairable:
        return "its heads do not divide: each device takes those that its queries use"
    sizes = [layer._kernel.shape[d] for d, axes in enumerate(layer._kernel._storage.layout.dims) if axes]
    uneven = next((size for size in sizes if size % rule.parts), None)
    where = ", ".join(map(repr, rule.axes))
    return "" if uneven is None else f"its kernel has no equal parts on axis {where} ({uneven} over {rule.parts})"


def agreed(frame: Frame, reasons: list[str]) -> list[str]:
    """What speaks against each of several things, the same on every rank: "" where no rank has a reason, else that of
    the lowest rank with one, and that it is this rank's where not all have one. A collective of the mesh."""
    told = [math.inf if reason == "" else float(frame.rank) for reason in reasons]
    by_all = [0.0 if reason == "" else 1.0 for reason in reasons]
    found = _over_ranks(frame, torch.tensor([*told, *by_all]), "min").tolist()
    lowest, by_all = found[: len(reasons)], found[len(reasons) :]
    against = [k for k, rank in enumerate(lowest) if rank < math.inf]
    if not against:
        return [""] * len(reasons)
    own = [_encoded(reasons[k] if lowest[k] == frame.rank else "") for k in against]
    texts = _over_ranks(frame, torch.tensor(own), "sum").tolist()
    out = [""] * len(reasons)
    for k, text in zip(against, texts, strict=True):
        out[k] = _decoded(text) + ("" if by_all[k] else f" (as rank {lowest[k]:.0f} found)")
    return out


def _over_ranks(frame: Frame, own: torch.Tensor, op: Any) -> torch.Tensor:
    mesh = frame.world.mesh
    partial = Sharding(mesh, Layout(partial=dict.fromkeys(mesh.axis_names, op)), tuple(own.shape))
    out: torch.Tensor = frame.world.backend.redistribute(own, partial, partial.with_layout(Layout()))
    return out


def _encoded(text: str) -> list[float]:
    raw = text.encode()[:_BYTES]
    return [*map(float, raw), *[0.0] * (_BYTES - len(raw))]


def _decoded(numbers: list[float]) -> str:
    return bytes(int(number) for number in numbers).rstrip(b"\0").decode(errors="ignore")

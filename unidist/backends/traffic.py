"""Reports what a rank sends in a collective to whom listens (the ledger)."""

from __future__ import annotations

from unidist import events
from unidist.algebra import Axes, Group, Redistribution, ring_bytes


def report(op: str, axes: Axes, group: Group, full: int) -> None:
    """Reports a collective of a group whose full tensor has so many bytes."""
    sent = ring_bytes(op, group.size, full)
    events.emit(events.Event(op, axes, group.ranks, sent, events.purpose()))


def report_steps(moves: Redistribution, rank: int, itemsize: int) -> None:
    """Reports a plan's collectives as a rank sends them, of elements of so many bytes."""
    for step in moves.collectives:
        group = step.before.mesh.group(step.axes, rank)
        sent = step.bytes(itemsize, rank)
        events.emit(events.Event(step.op, step.axes, group.ranks, sent, events.purpose()))

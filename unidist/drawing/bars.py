"""Bars: the memory of a device, part by part, and what a ledger holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unidist.drawing.canvas import MARGIN, WIDTH, Canvas, Picture, width_of
from unidist.drawing.style import colour
from unidist.ledger import Ledger
from unidist.planner.choosing import size_text
from unidist.planner.plan import Plan

_NAMES_ROOM, _BARS, _BARS_END = 290, 320, 810
_PURPOSES = 10


@dataclass(frozen=True, slots=True)
class Memory:
    """Holds what is on a device: (what, bytes) of each part. `note`: what is beside them."""

    parts: tuple[tuple[str, int], ...]
    note: str = ""

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


def memory_of(plan: Plan) -> Memory:
    """Returns the memory that a plan counts."""
    return Memory(
        (
            ("weights", plan.bytes_per_device),
            ("gradients", plan.gradient_bytes_per_device),
            ("optimizer slots", plan.slot_bytes_per_device),
            ("activations", plan.activation_bytes_per_device),
        ),
        f"Activations: an estimate, for a batch of {plan.batch_in_words}. What is gathered of the layer at work comes "
        "on top.",
    )


def label_of(plan: Plan) -> str:
    """A plan's place among others: its mesh and its stage of ZeRO."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.axes)
    return f"{sizes}, zero {plan.zero}" if plan.zero else sizes


def picture_of_memory(bars: Sequence[tuple[str, Memory]], device_memory: int | None, title: str | None) -> Picture:
    """Stacked bars, one for each label.

    Args:
        device_memory: bytes that a device has: a line, and a word where a bar is longer.
    """
    canvas = Canvas(title or "Memory of the device that holds most")
    kinds = list(dict.fromkeys(what for _, memory in bars for what, _ in memory.parts))
    canvas.legend([(colour(k), what) for k, what in enumerate(kinds)], 52)
    most = max([memory.total for _, memory in bars] + [device_memory or 0]) or 1
    scale = (_BARS_END - _BARS) / most
    top = y = 100.0
    for label, memory in bars:
        canvas.text(_NAMES_ROOM + MARGIN, y + 19, label, anchor="end", room=_NAMES_ROOM)
        _stack(canvas, label, memory, kinds, y, scale)
        _total(canvas, memory, device_memory, scale, y + 19)
        y += 38
    if device_memory is not None:
        x = _BARS + device_memory * scale
        canvas.line([(x, top - 8), (x, y)], kind="k", width=1.6, dashed=True)
        canvas.text(x, top - 14, f"a device has {size_text(device_memory)}", size=12, anchor="middle", room=220)
    for note in dict.fromkeys(memory.note for _, memory in bars if memory.note):
        y = canvas.paragraph(MARGIN, y + 22, note, room=WIDTH - 2 * MARGIN) - 14
    said = (
        f"{label}: " + ", ".join(f"{what} {size_text(size)}" for what, size in memory.parts) for label, memory in bars
    )
    return canvas.picture("; ".join(said))


def _total(canvas: Canvas, memory: Memory, device_memory: int | None, scale: float, y: float) -> None:
    x = _BARS + memory.total * scale + 8
    if device_memory is None or memory.total <= device_memory:
        text = size_text(memory.total)
        # Behind the line of what a device has, where it would cross the text.
        line = None if device_memory is None else _BARS + device_memory * scale
        crossed = line is not None and x - 4 < line < x + width_of(text, 13) + 4
        canvas.text(line + 8 if line is not None and crossed else x, y, text)
        return
    canvas.text(x, y, f"{size_text(memory.total)}: {memory.total / device_memory:.1f} x a device", size=12, bold=True)


def _stack(canvas: Canvas, label: str, memory: Memory, kinds: Sequence[str], y: float, scale: float) -> None:
    x = float(_BARS)
    for what, size in memory.parts:
        if not size:
            continue
        wide = size * scale
        canvas.rect(x, y, wide, 28, colour(kinds.index(what)), title=f"{label}: {what} {size:,} bytes")
        text = size_text(size)
        if width_of(text, 11) + 8 <= wide:
            canvas.text(x + wide / 2, y + 18, text, size=11, anchor="middle", room=wide - 4)
        x += wide


def picture_of_ledger(ledger: Ledger, title: str | None) -> Picture:
    """A ledger's bytes by collective and axis, and what they were for."""
    canvas = Canvas(title or f"{ledger.count():,} collectives, {size_text(ledger.bytes())} sent by a rank")
    rows = ledger.rows()
    kinds = list(dict.fromkeys((op, axes) for op, axes, *_ in rows))
    fills = {kind: colour(k) for k, kind in enumerate(kinds)}
    y = _bars(canvas, "By collective and axis", _sums(rows, kinds), fills, 66)
    largest = sorted(rows, key=lambda row: (-row[4], row[:3]))
    lines: list[_Bar] = [
        (f"{why or 'unnamed'}: {op}{' over ' if axes else ''}{axes}", (op, axes), n, float(b))
        for op, axes, why, n, b in largest[:_PURPOSES]
    ]
    if len(largest) > _PURPOSES:
        rest = largest[_PURPOSES:]
        lines.append((f"{len(rest)} more", None, sum(r[3] for r in rest), float(sum(r[4] for r in rest))))
    y = _bars(canvas, "By purpose, the largest first", lines, fills, y + 26)
    if not rows:
        canvas.text(MARGIN, 90, "Nothing was sent.")
    said = "; ".join(
        f"{op} over {axes} for {why or 'unnamed'}: {n} times, {b:,} bytes" for op, axes, why, n, b in rows[:40]
    )
    return canvas.picture(said or "nothing was sent")


_Bar = tuple[str, tuple[str, str] | None, int, float]


def _sums(rows: Sequence[tuple[str, str, str, int, int | float]], kinds: Sequence[tuple[str, str]]) -> list[_Bar]:
    made: list[_Bar] = []
    for op, axes in kinds:
        mine = [row for row in rows if row[:2] == (op, axes)]
        over = f"{op} over {axes}" if axes else op
        made.append((over, (op, axes), sum(row[3] for row in mine), float(sum(row[4] for row in mine))))
    return made


def _bars(canvas: Canvas, heading: str, bars: Sequence[_Bar], fills: Mapping[tuple[str, str], str], y: float) -> float:
    if not bars:
        return y
    canvas.text(MARGIN, y, heading, kind="m")
    y += 12
    most = max(size for *_, size in bars) or 1
    for words, kind, count, size in bars:
        canvas.text(_NAMES_ROOM + MARGIN, y + 15, words, size=12, anchor="end", room=_NAMES_ROOM)
        wide = max(1.0, 470 * size / most)
        canvas.rect(
            _BARS,
            y,
            wide,
            21,
            "gr" if kind is None else fills[kind],
            title=f"{words}: {count} times, {size:,.0f} bytes",
        )
        canvas.text(_BARS + wide + 8, y + 15, f"{size_text(size)} in {count:,}", size=12)
        y += 27
    return y

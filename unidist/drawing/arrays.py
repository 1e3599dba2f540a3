"""Draws arrays: one by itself, several beside each other, one on its way to a layout; and meshes."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from unidist.algebra import Mesh, redistribution
from unidist.algebra.step import Step
from unidist.backends.protocol import itemsize
from unidist.drawing.canvas import MARGIN, WIDTH, Canvas, Picture
from unidist.drawing.shards import MOST_DEVICES, View, dim_text, facts, rectangle, size_of, tint, told
from unidist.drawing.style import colour
from unidist.errors import DrawingError
from unidist.planner.choosing import size_text

_LISTED = 20
_LEFT = 54


def picture_of_array(view: View, title: str | None) -> Picture:
    """Shards as blocks, with a list of them."""
    canvas = Canvas(title or view.name)
    w, h = size_of(view, 500, 340)
    x, y = _LEFT, 84
    _edges(canvas, view, x, y, w, h)
    made = rectangle(canvas, view, x, y, w, h)
    beside = max(_LEFT + w + 40, 420)
    for k, block in enumerate(made[:_LISTED]):
        line = y + 12 + k * 21
        fill, hatched = "gr" if block.is_empty else tint(view, k, block), view.is_partial and not block.is_empty
        canvas.rect(beside, line - 11, 13, 13, fill, hatched=hatched)
        canvas.text(beside + 22, line, told(view, block), size=12.5)
    if len(made) > _LISTED:
        canvas.text(
            beside, y + 12 + _LISTED * 21, f"and {len(made) - _LISTED} blocks more, each with a tooltip", size=12.5
        )
    _said(canvas, facts(view))
    return canvas.picture("; ".join(told(view, block) for block in made))


def picture_of_several(views: Mapping[str, View], title: str | None) -> Picture:
    """Arrays beside each other, each with its name."""
    canvas = Canvas(title or f"{len(views)} arrays")
    columns = min(3, len(views))
    room = (WIDTH - 2 * MARGIN) / columns
    top, said = 44.0, []
    entries = list(views.items())
    for begin in range(0, len(entries), columns):
        for k, (label, view) in enumerate(entries[begin : begin + columns]):
            x = MARGIN + k * room
            canvas.text(x, top + 24, label, bold=True, room=room - 20)
            canvas.text(x, top + 43, _short(view), size=12, kind="m", room=room - 20)
            _small(canvas, view, x, top + 56, room - 24)
            said.append(f"{label}: {view.name}")
        top = canvas.bottom + 14
    return canvas.picture("; ".join(said))


def picture_of_moves(source: View, target: View, title: str | None) -> Picture:
    """An array before and after, and between them the collectives, with what each sends.

    Raises:
        LayoutError: there is no way between the layouts.
    """
    way = redistribution(source.sharding, target.sharding)
    canvas = Canvas(title or f"{source.sharding.shape}: {source.sharding.layout} to {target.sharding.layout}")
    views = [source, *(View(step.after, source.dtype) for step in way)]
    columns = min(3, len(views))
    gap = 150
    room = min(330.0, (WIDTH - 2 * MARGIN - gap * (columns - 1)) / columns)
    top, said = 52.0, []
    for k, view in enumerate(views):
        column = k % columns
        if k and not column:
            top = canvas.bottom + 40
        x = MARGIN + column * (room + gap)
        canvas.text(x, top + 12, str(view.sharding.layout), size=12.5, bold=True, room=room + gap - 12)
        canvas.text(x, top + 29, f"{size_text(view.most_bytes)} a device", size=12, kind="m", room=room)
        _small(canvas, view, x, top + 40, room - 6)
        if k:
            said.append(_arrow(canvas, way.steps[k - 1], source.dtype, x, top, gap, wraps=not column))
    if not way.steps:
        canvas.text(MARGIN, canvas.bottom + 24, "Nothing is to be done: the layouts are the same.", kind="m")
    total = max(way.bytes(itemsize(source.dtype), rank) for rank in source.mesh.devices)
    sizes = ", ".join(f"{axis}={size}" for axis, size in source.mesh.axes)
    _said(canvas, [f"{_amount(total)} sent by each rank in all, by the ring bounds; mesh {sizes}."])
    return canvas.picture("; ".join(said) or "the layouts are the same")


def picture_of_mesh(mesh: Mesh, title: str | None) -> Picture:
    """The devices at their places.

    Raises:
        DrawingError: there are more than a picture can name.
    """
    if mesh.size > MOST_DEVICES:
        raise DrawingError(f"a mesh of {mesh.size} devices: a picture shows {MOST_DEVICES} at most")
    canvas = Canvas(title or f"Mesh: {', '.join(f'{axis}={size}' for axis, size in mesh.axes)}")
    columns = mesh.shape[-1]
    rows = mesh.size // columns
    x, y, w, h = _LEFT + 20, 84, min(880 / columns, 110), max(16, min(44, 1200 // rows))
    last = mesh.axis_names[-1]
    canvas.text(x, y - 12, f"{last!r}, {columns} places from left to right", size=12.5, kind="m")
    others = ", ".join(f"{axis!r}, {size}" for axis, size in mesh.axes[:-1])
    if others:
        canvas.text(
            x - 16, y + rows * h / 2, others, size=12.5, kind="m", anchor="middle", upright=True, room=max(60, rows * h)
        )
    for place, rank in enumerate(mesh.devices):
        row, column = divmod(place, columns)
        where = ", ".join(f"{axis} {at}" for axis, at in mesh.coordinate(rank).items())
        left, top = x + column * w, y + row * h
        canvas.rect(left, top, w, h, colour(row), title=f"rank {rank}: {where}")
        canvas.text(left + w / 2, top + h / 2 + 4, f"rank {rank}" if w > 60 else str(rank), anchor="middle", room=w - 4)
    return canvas.picture(f"{mesh.size} devices: " + "; ".join(f"rank {r}" for r in mesh.devices))


def _short(view: View) -> str:
    return f"{view.sharding.shape} as {view.sharding.layout}"


def _edges(canvas: Canvas, view: View, x: float, y: float, w: float, h: float) -> None:
    down, across = view.shown
    room = max(w, 240.0)
    canvas.text(x, y - 9, dim_text(view, across, room, 12), size=12, kind="m", room=room)
    if down is not None:
        text = dim_text(view, down, h, 12)
        canvas.text(x - 12, y + h / 2, text, size=12, kind="m", anchor="middle", upright=True, room=h)


def _small(canvas: Canvas, view: View, x: float, y: float, room: float) -> None:
    w, h = size_of(view, room - 26, 170)
    _edges(canvas, view, x + 22, y + 18, w, h)
    made = rectangle(canvas, view, x + 22, y + 18, w, h)
    line = y + 18 + h + 20
    for text in [told(view, block) for block in made if block.is_empty] + facts(view)[1:]:
        line = canvas.paragraph(x, line, text, size=12, room=room - 8)


def _arrow(canvas: Canvas, step: Step, dtype: str, x: float, top: float, gap: float, *, wraps: bool) -> str:
    devices = step.before.mesh.devices
    sent = max(step.bytes(itemsize(dtype), rank) for rank in devices)
    over = f"over {', '.join(step.axes)}"
    amount = f"{_amount(sent)} a rank" if step.is_collective else "sends nothing"
    if wraps:
        canvas.arrow((x + 8, top - 22), (x + 8, top - 4))
        canvas.text(x + 24, top - 8, f"{step.op} {over}: {amount}", size=12.5)
    else:
        middle, y = x - gap / 2 - 3, top + 130
        canvas.text(middle, y - 14, step.op, size=13, bold=True, anchor="middle", room=gap - 12)
        canvas.arrow((x - gap + 12, y), (x - 16, y))
        canvas.text(middle, y + 20, over, size=12, kind="m", anchor="middle", room=gap - 12)
        canvas.text(middle, y + 38, amount, size=12, kind="m", anchor="middle", room=gap - 12)
    return f"{step.op} {over}: {amount}"


def _amount(sent: Fraction) -> str:
    return size_text(float(sent))


def _said(canvas: Canvas, lines: list[str]) -> None:
    y = canvas.bottom + 30
    for line in lines:
        y = canvas.paragraph(MARGIN, y, line, room=WIDTH - 2 * MARGIN)

"""Draws the graph of a model: its layers in order, what is cut how, pairs in brackets, collectives."""

from __future__ import annotations

from collections.abc import Sequence

from unidist.drawing.canvas import MARGIN, WIDTH, Canvas, Picture
from unidist.drawing.layers import KINDS, Fold, Layer, Sent, folded
from unidist.planner.choosing import size_text

# More layers than these, after folding, are shown by their number and bytes alone.
MOST_LAYERS = 150
_LANES = 4
_BOX, _BOX_ROOM = MARGIN + _LANES * 9 + 14, 416
_BYTES, _BYTES_ROOM = 502, 210
_SENT = 734
_TALL, _FLAT, _GAP = 42, 26, 6


def picture_of_layers(
    name: str, layers: Sequence[Layer], rest: Sequence[Sent] = (), *, lines: Sequence[str] = (), sends: bool = True
) -> Picture:
    """Draws layers from the top down.

    Args:
        rest: collectives that belong to no layer.
        lines: what is said below the title.
        sends: whether what layers send is known.
    """
    canvas = Canvas(name)
    y = 40.0
    for line in lines:
        y = canvas.paragraph(MARGIN, y + 17, line, room=WIDTH - 2 * MARGIN) - 17
    y = _legend(canvas, y + 20, dict.fromkeys(layer.kind for layer in layers), any(layer.pair for layer in layers))
    canvas.text(_BOX, y + 16, "layers, in the model's order", size=12, kind="m")
    canvas.text(_BYTES, y + 16, "bytes a device", size=12, kind="m", room=_BYTES_ROOM)
    if sends:
        canvas.text(_SENT, y + 16, "sent by a rank in a training step", size=12, kind="m")
    y += 26
    most = max((layer.held for layer in layers), default=1) or 1
    shown = _first(folded(layers))
    for fold in shown:
        y = _fold(canvas, fold, y, most)
    left_out = layers[sum(len(fold.layers) * fold.times for fold in shown) :]
    if left_out:
        held = size_text(sum(layer.held for layer in left_out))
        canvas.text(_BOX, y + 16, f"and {len(left_out)} layers more, {held} a device", size=12.5)
        y += 24
    for sent in rest:
        canvas.text(_BOX, y + 18, sent.purpose or "all else", size=12.5, kind="m")
        _collective(canvas, sent, y + 18)
        y += 22
    total, whole = sum(layer.held for layer in layers), sum(layer.whole for layer in layers)
    canvas.line([(MARGIN, y + 8), (WIDTH - MARGIN, y + 8)])
    canvas.text(_BOX, y + 30, f"all variables, {size_text(whole)}", bold=True)
    canvas.text(_BYTES, y + 30, size_text(total), bold=True, room=_BYTES_ROOM)
    return canvas.picture("; ".join(_words(layer) for layer in layers[:MOST_LAYERS]))


def _first(folds: Sequence[Fold]) -> list[Fold]:
    out, left = [], MOST_LAYERS
    for fold in folds:
        if len(fold.layers) > left:
            # A part of what repeats would be another model's.
            out += [Fold(fold.layers[:left])] if fold.times == 1 and left else []
            break
        out.append(fold)
        left -= len(fold.layers)
    return out


def _legend(canvas: Canvas, y: float, kinds: dict[str, None], paired: bool) -> float:
    x, y = canvas.legend([entry for kind, entry in KINDS.items() if kind in kinds], y)
    if paired:
        if x + 260 > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 22
        canvas.line([(x + 10, y), (x + 3, y), (x + 3, y + 14), (x + 10, y + 14)], kind="k", width=1.6)
        canvas.text(x + 20, y + 12, "a pair: between them activations stay cut", size=12)
    return y + 22


def _fold(canvas: Canvas, fold: Fold, y: float, most: int) -> float:
    if fold.times == 1:
        return _layers(canvas, fold.layers, y, most)
    held = sum(layer.held for layer in fold.layers)
    below = y + 26 + sum(_height(layer) + _GAP for layer in fold.layers) + 4
    canvas.rect(MARGIN - 6, y, WIDTH - 2 * MARGIN + 12, below - y, "pn", round_=6)
    words = f"x {fold.times}, each {size_text(held)} a device, together {size_text(held * fold.times)}"
    canvas.text(_BOX, y + 18, words, size=13, bold=True)
    return _layers(canvas, fold.layers, y + 26, most) + 10


def _height(layer: Layer) -> int:
    return _FLAT if layer.kind == "whole" and not layer.sent else _TALL


def _layers(canvas: Canvas, layers: Sequence[Layer], y: float, most: int) -> float:
    tops = []
    for layer in layers:
        tops.append(y)
        _layer(canvas, layer, y, most)
        y += _height(layer) + _GAP
    _brackets(canvas, layers, tops)
    return y


def _layer(canvas: Canvas, layer: Layer, y: float, most: int) -> None:
    tall = _height(layer)
    canvas.rect(_BOX, y, _BOX_ROOM, tall, KINDS[layer.kind][0], title=_words(layer), round_=5)
    if tall == _FLAT:
        canvas.text(_BOX + 12, y + 17, layer.path, size=12.5, room=_BOX_ROOM - 24)
    else:
        canvas.text(_BOX + 12, y + 17, layer.path, size=13, bold=True, room=_BOX_ROOM - 24)
        canvas.text(_BOX + 12, y + 34, layer.detail, size=12, room=_BOX_ROOM - 24)
    middle = y + tall / 2
    canvas.rect(_BYTES, middle - 7, max(1.0, 60 * layer.held / most), 14, KINDS[layer.kind][0])
    part = "" if layer.held == layer.whole else f" of {size_text(layer.whole)}"
    canvas.text(_BYTES + 68, middle + 4, f"{size_text(layer.held)}{part}", size=12, room=_BYTES_ROOM - 72)
    for k, sent in enumerate(layer.sent[:2]):
        _collective(
            canvas, sent, middle + 4 + (k * 18 - 9 if len(layer.sent) > 1 else 0), more=len(layer.sent) - 2 if k else 0
        )


def _collective(canvas: Canvas, sent: Sent, y: float, more: int = 0) -> None:
    times = f"{sent.count} x " if sent.count > 1 else ""
    behind = f" and {more} more" if more > 0 else ""
    words = f"{times}{sent.op} over {', '.join(sent.axes)}, {size_text(float(sent.bytes))}{behind}"
    canvas.line([(_SENT - 16, y - 4), (_SENT - 6, y - 4)], kind="k", width=1.6)
    canvas.text(_SENT, y, words, size=12)


def _brackets(canvas: Canvas, layers: Sequence[Layer], tops: Sequence[float]) -> None:
    members: dict[int, list[int]] = {}
    for k, layer in enumerate(layers):
        if layer.pair is not None:
            members.setdefault(layer.pair[0], []).append(k)
    ends = [-1] * _LANES
    for places in members.values():
        lane = next((k for k, end in enumerate(ends) if end < places[0]), _LANES - 1)
        ends[lane] = max(ends[lane], places[-1])
        x = _BOX - 10 - lane * 9
        heights = [tops[k] + _height(layers[k]) / 2 for k in places]
        canvas.line([(x, heights[0]), (x, heights[-1])], kind="k", width=1.6)
        for height in heights:
            canvas.line([(x, height), (_BOX - 2, height)], kind="k", width=1.6)


def _words(layer: Layer) -> str:
    cut = KINDS[layer.kind][1]
    how = layer.why if layer.why.startswith(cut) else f"{cut}, {layer.why}" if layer.why else cut
    return f"{layer.path}: {how}; {layer.detail}"

"""Canvas: writes SVG. Text is escaped, measured and shortened here; nothing else makes markup."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from unidist.drawing.style import ROOT, STYLE
from unidist.errors import DrawingError

WIDTH = 1000
MARGIN = 20
# Widths in units of the font's size: those of Helvetica and Arial, and a little more.
_NARROW = dict.fromkeys("ijl.,:;'|!I", 0.3) | dict.fromkeys(' ()[]{}/\\frt-"`', 0.36)
_WIDE = dict.fromkeys("mwMWOQ@%&", 0.9) | dict.fromkeys("ABCDEGHKNPRSTUVXYZ", 0.74) | dict.fromkeys("+=<>~_#$", 0.62)
_WIDTHS = _NARROW | _WIDE
_OTHER, _BOLD = 0.59, 1.08


def width_of(text: str, size: float, bold: bool = False) -> float:
    """Pixels that a line of text takes, at most.

    Example:
        >>> width_of("rank 0", 10) > width_of("rank", 10) > 20
        True
    """
    units = sum(_WIDTHS.get(mark, _OTHER if mark.isascii() else _of_others(mark)) for mark in text)
    return units * size * (_BOLD if bold else 1.0)


def _of_others(mark: str) -> float:
    if unicodedata.combining(mark):
        return 0.0
    return 1.1 if unicodedata.east_asian_width(mark) in "WF" else 0.9


def shortened(text: str, room: float, size: float, bold: bool = False) -> str:
    """The text, without as much of its middle as it takes to have room.

    Example:
        >>> shortened("decoder/layer_17/attention/query", 120, 10)
        'decoder/la…ntion/query'
    """
    if width_of(text, size, bold) <= room:
        return text
    for kept in range(len(text) - 1, 0, -1):
        end = (kept + 1) // 2
        found = f"{text[: kept - end]}…{text[len(text) - end :]}"
        if width_of(found, size, bold) <= room:
            return found
    return "…"


def number(value: float) -> str:
    """A coordinate: two digits behind the point, as few as it needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def plain(text: str) -> str:
    """Text for XML: escaped, and without the marks that no XML may hold."""
    return escape("".join(mark if mark.isprintable() or mark == " " else "�" for mark in text))


@dataclass(frozen=True)
class Picture:
    """A drawing. Notebooks show it by themselves.

    Attributes:
        title: what it shows, in a line.
        svg: the drawing: SVG that needs nothing from elsewhere. The same for the same input, byte for byte.

    Example:
        >>> import unidist
        >>> mesh = unidist.Mesh({"data": 4})
        >>> picture = unidist.draw(unidist.Layout("data"), mesh=mesh, shape=(10, 3))
        >>> picture.title
        "(10, 3) float32 as Layout('data') on data=4"
        >>> picture.svg.startswith("<svg")
        True
    """

    title: str
    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the drawing to a file, and gives its path.

        Raises:
            DrawingError: the file's name does not end in .svg.
        """
        file = Path(path)
        if file.suffix.lower() != ".svg":
            raise DrawingError(f"save({os.fspath(path)!r}): pictures are SVG, name a file that ends in .svg")
        file.write_text(self.svg, encoding="utf-8")
        return file


class Canvas:
    """Takes shapes and texts below its title, from the top to the bottom; `picture` closes it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self._bottom = 0.0
        self._hatched = False
        self.text(MARGIN, 34, title, size=17, bold=True)

    @property
    def bottom(self) -> float:
        """Returns where the lowest thing ends."""
        return self._bottom

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        kind: str,
        *,
        title: str = "",
        round_: float = 0,
        edge: bool = True,
        hatched: bool = False,
    ) -> None:
        """A rectangle of a class of the style sheet, with a tooltip, and with stripes where it is hatched."""
        corners = f' rx="{number(round_)}"' if round_ else ""
        classes = f"{kind} l" if edge else kind
        place = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"'
        inside = f"><title>{plain(title)}</title></rect>" if title else "/>"
        self._parts.append(f'<rect class="{classes}" {place}{corners}{inside}')
        if hatched:
            self._hatched = True
            self._parts.append(f'<rect {place} fill="url(#\0)" pointer-events="none"/>')
        self._bottom = max(self._bottom, y + h)

    def line(
        self, points: Sequence[tuple[float, float]], *, kind: str = "l", width: float = 1, dashed: bool = False
    ) -> None:
        """A line through points."""
        way = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<polyline class="n {kind}" stroke-width="{number(width)}"{dashes} points="{way}"/>')
        self._bottom = max(self._bottom, *(y for _, y in points))

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """A line with a head, to the right or down."""
        (x, y), across = end, end[0] != start[0]
        self.line([start, end], kind="k", width=1.6)
        sides = [(x - 7, y - 4), (x, y), (x - 7, y + 4)] if across else [(x - 4, y - 7), (x, y), (x + 4, y - 7)]
        self.line(sides, kind="k", width=1.6)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        kind: str = "t",
        bold: bool = False,
        anchor: str = "start",
        room: float | None = None,
        upright: bool = False,
    ) -> None:
        """Writes a line of text whose baseline is at y.

        What has no room loses its middle and keeps the whole as a tooltip.

        Args:
            anchor: "start", "middle" or "end" of the text is at x.
            room: pixels that it may take; None: up to the picture's edge.
            upright: it runs from the bottom to the top.
        """
        left, right = x - MARGIN / 2, WIDTH - MARGIN / 2 - x
        edge = {"start": right, "end": left, "middle": 2 * min(left, right)}[anchor]
        space = room if upright and room is not None else min(edge, edge if room is None else room)
        shown = shortened(text, space, size, bold)
        whole = f"<title>{plain(text)}</title>" if shown != text else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        turned = f' transform="rotate(-90 {number(x)} {number(y)})"' if upright else ""
        classes = f"{kind} b" if bold else kind
        self._parts.append(
            f'<text class="{classes}" x="{number(x)}" y="{number(y)}" font-size="{number(size)}"{where}{turned}>'
            f"{whole}{plain(shown)}</text>"
        )
        if not upright:
            self._bottom = max(self._bottom, y + size * 0.3)

    def paragraph(self, x: float, y: float, text: str, *, size: float = 13, room: float) -> float:
        """Lines of text, broken between words. The baseline of a line that would follow."""
        lines, line = [], ""
        for word in text.split():
            longer = f"{line} {word}".strip()
            if line and width_of(longer, size) > room:
                lines.append(line)
                longer = word
            line = longer
        for k, found in enumerate([*lines, line]):
            self.text(x, y + k * size * 1.45, found, size=size, kind="m", room=room)
        return y + (len(lines) + 1) * size * 1.45

    def legend(self, entries: Iterable[tuple[str, str]], y: float, hatched: Container[str] = ()) -> tuple[float, float]:
        """Squares of classes with their words, from line to line. Where the next one would be."""
        x = float(MARGIN)
        for fill, words in entries:
            wide = 46 + width_of(words, 12)
            if x + wide > WIDTH - MARGIN:
                x, y = float(MARGIN), y + 22
            self.rect(x, y, 14, 14, fill, hatched=fill in hatched)
            self.text(x + 20, y + 12, words, size=12)
            x += wide
        return x, y

    def picture(self, description: str) -> Picture:
        """The picture, on a ground of its own."""
        title, height = self._title, round(self._bottom + MARGIN)
        body = "".join(self._parts)
        name = "u" + hashlib.sha256(f"{title}\0{description}\0{body}".encode()).hexdigest()[:8]
        pattern = (
            f'<defs><pattern id="{name}h" width="7" height="7" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect class="h" width="1.3" height="7"/></pattern></defs>'
        )
        hatch = "#\0"  # which no text holds
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{ROOT}" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" style="max-width:100%;height:auto" role="img" '
            f'aria-labelledby="{name}t {name}d">'
            f'<title id="{name}t">{plain(title)}</title><desc id="{name}d">{plain(description)}</desc>'
            f"<style>{STYLE}</style>{pattern if self._hatched else ''}"
            f'<rect class="bg" width="{WIDTH}" height="{height}"/>'
            f"{body.replace(hatch, f'#{name}h')}</svg>\n"
        )
        return Picture(title, svg)

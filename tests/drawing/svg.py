"""Reading a picture back: its rectangles, its texts, and what they say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass

NAMESPACE = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Rect:
    kind: str
    x: float
    y: float
    w: float
    h: float
    title: str

    @property
    def area(self) -> float:
        return self.w * self.h


def root(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def rects(svg: str) -> list[Rect]:
    """The rectangles that have a tooltip: those that stand for something."""
    found = []
    for element in root(svg).iter(f"{NAMESPACE}rect"):
        title = element.find(f"{NAMESPACE}title")
        if title is not None:
            x, y, w, h = (float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
            found.append(Rect(element.get("class", "").split()[0], x, y, w, h, title.text or ""))
    return found


def texts(svg: str) -> list[str]:
    """What is written, without tooltips."""
    found = []
    for element in root(svg).iter(f"{NAMESPACE}text"):
        title = element.find(f"{NAMESPACE}title")
        found.append((element.text or "") if title is None else (title.tail or ""))
    return found


def said(svg: str) -> str:
    return "\n".join(texts(svg))


def ranks_of(title: str) -> set[int]:
    """The ranks of a tooltip such as "ranks (0, 2) + (1, 3): dim 0 [0:3]"."""
    head = title.partition(":")[0]
    for first, last, step in re.findall(r"(\d+)-(\d+)(?: by (\d+))?", head):
        head += " " + " ".join(map(str, range(int(first), int(last) + 1, int(step or 1))))
    # The step of a run is no rank.
    return set(map(int, re.findall(r"\d+", re.sub(r" by \d+", "", head))))

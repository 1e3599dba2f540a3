"""The colours of pictures, by day and by night, and the style sheet that every picture carries."""

from __future__ import annotations

# name -> (by day, by night). What text stands on is a pastel by day and deep by night; tests measure the contrasts.
GROUND = ("#ffffff", "#0d1117")
PANEL = ("#f3f5f8", "#1a2029")
INK = ("#1b1f24", "#eef2f6")
MUTED = ("#515a64", "#a9b4c0")
LINE = ("#7d8792", "#78828e")
FILLS: dict[str, tuple[str, str]] = {
    "c0": ("#b6d4fe", "#1d4474"),
    "c1": ("#ffd3a8", "#70401a"),
    "c2": ("#b7e4b8", "#1f5a2c"),
    "c3": ("#dcc7f5", "#4f3278"),
    "c4": ("#fcc5c9", "#722a33"),
    "c5": ("#aee5e2", "#15545a"),
    "c6": ("#f3e59a", "#5c5010"),
    "c7": ("#d8d2c4", "#4a453a"),
    "gr": ("#e1e5ea", "#333b45"),
}
COLOURS = tuple(name for name in FILLS if name != "gr")
# The class of the root: the rules reach nothing else of a page that holds the picture.
ROOT = "unidist-picture"
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def colour(index: int) -> str:
    """The class of the index-th of several things; they repeat."""
    return COLOURS[index % len(COLOURS)]


def _rules(night: int) -> str:
    plain = {"bg": GROUND, "pn": PANEL, **FILLS}
    fills = "".join(f".{ROOT} .{name}{{fill:{pair[night]}}}" for name, pair in plain.items())
    texts = f".{ROOT} .t{{fill:{INK[night]}}}.{ROOT} .m{{fill:{MUTED[night]}}}"
    lines = f".{ROOT} .l{{stroke:{LINE[night]}}}.{ROOT} .k{{stroke:{INK[night]}}}.{ROOT} .h{{fill:{LINE[night]}}}"
    return fills + texts + lines


STYLE = (
    f".{ROOT} text{{font-family:{FONT}}}.{ROOT} .b{{font-weight:bold}}.{ROOT} .n{{fill:none}}"
    + _rules(0)
    + "@media (prefers-color-scheme:dark){"
    + _rules(1)
    + "}"
)

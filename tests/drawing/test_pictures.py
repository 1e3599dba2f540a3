"""What holds for every picture: well formed, the same each time, legible by day and by night, nothing cut off."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.drawing.models import chain, plan_of
from tests.drawing.svg import NAMESPACE, root, texts
from unidist import DrawingError, Layout, Mesh, Picture, draw
from unidist.drawing import style
from unidist.drawing.canvas import Canvas, shortened, width_of

LONG = "a_very_long_name_" * 12
MESH = Mesh({"data": 2, "model": 2})


def pictures() -> dict[str, Picture]:
    plan = plan_of(chain(3), {"data": 2, "model": 2})
    long = plan_of(chain(2, (LONG + "/up_{}", LONG + "/down_{}", "head")), {LONG: 2, "model": 2})
    wide = Mesh({LONG: 2, "model": 32})
    return {
        "array": draw(Layout("data", "model"), mesh=MESH, shape=(6, 4)),
        "long axis": draw(Layout(LONG, "model"), mesh=wide, shape=(64, 4096)),
        "long axis, moved": draw(Layout(LONG, "model"), to=Layout("model", LONG), mesh=wide, shape=(64, 96)),
        "moved": draw(Layout("data", partial="model"), to=Layout(("model", "data")), mesh=MESH, shape=(6, 4)),
        "mesh": draw(wide),
        "plan": draw(plan),
        "long plan": draw(long),
        "memory": draw([plan, long], device_memory=1000),
        "ledger": draw(plan.predicted),
        "long ledger": draw(long.predicted),
        "title": draw(MESH, title=LONG),
    }


PICTURES = pictures()
AGAIN = pictures()
ALL = pytest.mark.parametrize("name", PICTURES)


@ALL
def test_it_is_the_same_each_time(name) -> None:
    assert PICTURES[name].svg == AGAIN[name].svg
    assert PICTURES[name].svg is not AGAIN[name].svg


@ALL
def test_it_says_what_it_is_to_those_who_do_not_see_it(name) -> None:
    tree = root(PICTURES[name].svg)
    assert tree.get("role") == "img"
    names = tree.get("aria-labelledby", "").split()
    found = {e.get("id"): e.text for e in tree if e.tag in (f"{NAMESPACE}title", f"{NAMESPACE}desc")}
    assert len(names) == 2
    assert list(found) == names
    assert all(found.values())
    ids = [e.get("id") for e in tree.iter() if e.get("id")]
    assert len(set(ids)) == len(ids)


@ALL
def test_no_text_and_no_shape_leaves_the_picture(name) -> None:
    tree = root(PICTURES[name].svg)
    width, height = (float(tree.get(side, "")) for side in ("width", "height"))
    assert width == 1000
    for e in tree.iter(f"{NAMESPACE}text"):
        title = e.find(f"{NAMESPACE}title")
        shown = (e.text or "") if title is None else (title.tail or "")
        if title is not None:
            begin, end = shown.split("…", 1)
            assert (title.text or "").startswith(begin)
            assert (title.text or "").endswith(end)
        x, y, size = (float(e.get(key, "0")) for key in ("x", "y", "font-size"))
        assert size >= 10
        assert 0 < y < height
        if not e.get("transform"):
            wide = width_of(shown, size, bold="b" in e.get("class", "").split())
            left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[e.get("text-anchor", "start")]
            assert left >= 0
            assert left + wide <= width
    for e in tree.iter(f"{NAMESPACE}rect"):
        place = [float(e.get(key, "0")) for key in ("x", "y", "width", "height")]
        assert place[0] >= 0
        assert place[0] + place[2] <= width + 0.01
        assert place[1] + place[3] <= height + 0.01


@ALL
def test_it_needs_nothing_from_elsewhere(name) -> None:
    svg = PICTURES[name].svg
    assert set(re.findall(r"[a-z]+://[^\"']*", svg)) == {"http://www.w3.org/2000/svg"}
    ids = {e.get("id") for e in root(svg).iter()}
    assert {found.removeprefix("#") for found in re.findall(r"url\(([^)]*)\)", svg)} <= ids
    rules = svg.partition("<style>")[2].partition("</style>")[0].replace("@media (prefers-color-scheme:dark){", "")
    assert all(rule.startswith(f".{style.ROOT} ") for rule in re.findall(r"([^{}]+)\{", rules))


def _luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("night", [0, 1], ids=["day", "night"])
def test_text_stands_out_by_day_and_by_night(night) -> None:
    """4.5 is what WCAG 2 asks of text, 3 of shapes."""
    for ground in (style.GROUND, style.PANEL, *style.FILLS.values()):
        assert _contrast(style.INK[night], ground[night]) >= 7
    for ground in (style.GROUND, style.PANEL):
        assert _contrast(style.MUTED[night], ground[night]) >= 4.5
        assert _contrast(style.LINE[night], ground[night]) >= 3
    rules = style.STYLE.split("@media (prefers-color-scheme:dark)")
    for name, pair in {"bg": style.GROUND, **style.FILLS}.items():
        assert f".{style.ROOT} .{name}{{fill:{pair[night]}}}" in rules[night]


def test_it_is_saved_as_svg(tmp_path: Path) -> None:
    picture = PICTURES["mesh"]
    assert picture.save(tmp_path / "mesh.svg").read_text(encoding="utf-8") == picture.svg == picture._repr_svg_()
    for wrong in ("mesh.png", "mesh", "mesh.svg.gz"):
        with pytest.raises(DrawingError, match=r"pictures are SVG, name a file that ends in \.svg"):
            picture.save(str(tmp_path / wrong))
    assert [path.name for path in tmp_path.iterdir()] == ["mesh.svg"]
    with pytest.raises(AttributeError):
        picture.svg = ""


def test_long_names_lose_their_middle() -> None:
    assert shortened("short", 100, 13) == "short"
    found = shortened("begin" + "x" * 100 + "end", 120, 13)
    assert found.startswith("begin")
    assert found.endswith("end")
    assert width_of(found, 13) <= 120
    assert shortened("any", 0, 13) == "…"
    assert width_of("層", 10) > width_of("m", 10) > width_of("i", 10)


def test_text_is_escaped_and_control_marks_are_replaced() -> None:
    canvas = Canvas("<t>")
    canvas.text(20, 20, "a<b>&\"'\x00\x1b\ud800\u202ez]]>")
    svg = canvas.picture("&d").svg
    assert texts(svg) == ["<t>", "a<b>&\"'\ufffd\ufffd\ufffd\ufffdz]]>"]
    svg.encode()

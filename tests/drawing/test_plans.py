"""Pictures of plans: every layer with its cut, its bytes and what it sends, pairs in brackets, blocks that repeat
once; bars of memory; ledgers; and the report as a page."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser

import pytest

from tests.drawing.models import chain, plan_of
from tests.drawing.svg import NAMESPACE, rects, root, said, texts
from unidist import DrawingError, Ledger, Plan, draw
from unidist.drawing.layers import KINDS, Layer, Sent, folded, of_plan
from unidist.drawing.page import report
from unidist.planner.choosing import size_text
from unidist.planner.facts import Activation, Affine, Calls, VariableFact

EVIL = ("<script>alert(1)</script>_{}", "]]>&amp;\"'\x00\u202e_{}", "</svg><b>")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(chain(1), {"data": 2, "model": 2})


def boxes(svg: str) -> dict[str, str]:
    """Layer -> the class of its box."""
    legend = {words: fill for fill, words in KINDS.values()}
    found = [(r.title.partition(": ")[0], r.kind, r.title) for r in rects(svg)]
    assert all(legend[words] == kind for _, kind, title in found for words in legend if f": {words}" in title)
    return {name: kind for name, kind, _ in found}


def test_each_layer_is_there_with_its_cut_and_its_bytes(plan) -> None:
    svg = draw(plan).svg
    assert boxes(svg) == {"up_0": "c0", "down_0": "c1", "head": "gr"}
    rows = {row.path: row for row in plan.rows}
    held = rows["up_0/kernel"].bytes_per_device + rows["up_0/bias"].bytes_per_device
    assert f"{size_text(held)} of {size_text(2 * held)}" in texts(svg)
    assert "kernel (64, 256) split on dim 1 over model" in texts(svg)
    assert size_text(plan.bytes_per_device) in texts(svg)


def test_collectives_stand_at_their_layers(plan) -> None:
    lines = texts(draw(plan).svg)
    layers, rest = of_plan(plan)
    assert [(layer.path, [(sent.op, sent.axes) for sent in layer.sent]) for layer in layers] == [
        ("up_0", [("all_reduce", ("model",))]),
        ("down_0", [("all_reduce", ("model",))]),
        ("head", []),
    ]
    assert [(sent.op, sent.axes, sent.purpose) for sent in rest] == [("all_reduce", ("data",), "gradients")]
    total = sum(float(sent.bytes) for sent in [*rest, *(s for layer in layers for s in layer.sent)])
    assert total == pytest.approx(plan.predicted.bytes())
    for sent in [*rest, *layers[0].sent]:
        assert f"{sent.op} over {sent.axes[0]}, {size_text(float(sent.bytes))}" in lines
    assert lines.index("gradients") > lines.index("head")


def brackets(svg: str) -> list[list[float]]:
    """Of each upright line at the left: where it begins and ends."""
    lines = [e.get("points", "").split() for e in root(svg).iter(f"{NAMESPACE}polyline")]
    places = [[tuple(map(float, point.split(","))) for point in line] for line in lines]
    return [[a[1], b[1]] for line in places if len(line) == 2 for a, b in [line] if a[0] == b[0] < 70]


def test_a_pair_is_bracketed_from_its_first_to_its_last_layer(plan) -> None:
    svg = draw(plan).svg
    places = {r.title.partition(": ")[0]: r.y + r.h / 2 for r in rects(svg)}
    assert brackets(svg) == [[places["up_0"], places["down_0"]]]
    alone = plan_of(chain(1), {"data": 4})
    assert brackets(draw(alone).svg) == []


@pytest.mark.parametrize("blocks", [2, 32])
def test_blocks_that_are_alike_are_drawn_once(blocks) -> None:
    plan = plan_of(chain(blocks), {"model": 2})
    svg = draw(plan).svg
    assert set(boxes(svg)) == {"up_0", "down_0", "head"}
    assert len(brackets(svg)) == 1
    layers, _ = of_plan(plan)
    once = sum(layer.held for layer in layers[:2])
    assert f"x {blocks}, each {size_text(once)} a device, together {size_text(blocks * once)}" in texts(svg)
    assert f"all variables, {size_text(sum(row.bytes for row in plan.rows))}" in texts(svg)


def test_blocks_that_differ_are_not_folded() -> None:
    facts = chain(2)
    first = facts.variables[0]
    other = type(first)(first.path, (64, 512), first.dtype, 4, layer=first.layer)
    found = plan_of(replace(facts, variables=(other, *facts.variables[1:])), {"model": 2})
    assert set(boxes(draw(found).svg)) == {"up_0", "down_0", "up_1", "down_1", "head"}


ALIKE = Layer("layer_0/dense", "column", "kernel (2, 2)", 8, 16, sent=(Sent("all_reduce", ("model",), 1, Fraction(8)),))


def test_layers_fold_that_differ_in_numbers_of_their_names_alone() -> None:
    alike = [replace(ALIKE, path=f"layer_{k}/dense", why=str(k)) for k in range(3)]
    assert [(fold.times, len(fold.layers)) for fold in folded(alike)] == [(3, 1)]
    sent = (Sent("all_reduce", ("model",), 1, Fraction(9)),)
    for other in (
        {"path": "other_1/dense"},
        {"kind": "row"},
        {"detail": "kernel (2, 3)"},
        {"held": 9},
        {"whole": 17},
        {"sent": sent},
        {"pair": (0, 0)},
    ):
        assert [fold.times for fold in folded([alike[0], replace(alike[1], **other), alike[2]])] == [1]


def test_states_of_a_few_bytes_are_one_line() -> None:
    facts = chain(4)
    variables = list(facts.variables)
    for k in (1, 3):
        state = VariableFact(f"seeds_{k}/state", (2,), "int64", 8, trainable=False, is_weight=False, layer=f"seeds_{k}")
        variables.insert(4 * k + k - 1, state)
    at = {v.path: k for k, v in enumerate(variables)}
    layers = [replace(x, kernel=at[f"{x.path}/kernel"], bias=at[f"{x.path}/bias"]) for x in facts.layers]
    found = replace(facts, variables=tuple(variables), layers=tuple(layers), slots=())
    svg = draw(plan_of(found, {"model": 2})).svg
    assert set(boxes(svg)) == {"up_0", "down_0", "head", "2 states of a few bytes"}
    assert "seeds_1, seeds_3" in svg
    assert "32 B" in texts(svg)


def halved(calls: Calls) -> Calls:
    """Two calls in place of one, of half of it each."""
    taken, given = ((amounts[0].times(0.5),) * 2 for amounts in (calls.taken, calls.given))
    return replace(calls, taken=taken, given=given, inputs=(*calls.inputs, *(-1 - n for n in calls.inputs)))


def test_collectives_of_several_calls_are_summed() -> None:
    facts = chain(1)
    twice = [replace(layer, calls=halved(layer.calls)) for layer in facts.layers]
    layers, _ = of_plan(plan_of(replace(facts, layers=tuple(twice)), {"model": 2}))
    (sent,) = layers[1].sent
    assert (sent.count, sent.bytes) == (2, 8 * 64 * 4)
    assert "2 x all_reduce over model, 2.0 KB" in texts(
        draw(plan_of(replace(facts, layers=tuple(twice)), {"model": 2})).svg
    )


def test_zero_3_shows_what_rests_in_parts() -> None:
    svg = draw(plan_of(chain(1), {"data": 4}, zero=3)).svg
    assert boxes(svg)["up_0"] == "c2"
    assert "parameters" in texts(svg)


def test_many_layers_are_told_by_number() -> None:
    facts = chain(120, ("up_{}", "down_{}", "head"))
    sizes = {f"up_{k}": 256 + 2 * k for k in range(120)}
    variables = tuple(
        type(v)(v.path, tuple(sizes.get(v.layer, n) if n == 256 else n for n in v.shape), v.dtype, 4, layer=v.layer)
        for v in facts.variables
    )
    svg = draw(plan_of(replace(facts, variables=variables), {"model": 2})).svg
    assert re.search(r"and 91 layers more, [\d.]+ MB a device", said(svg))
    assert len(boxes(svg)) == 150


# memory -----------------------------------------------------------------------------------------------------------


def test_bars_of_memory_have_the_lengths_of_their_bytes() -> None:
    facts = replace(chain(1), activations=(Activation((Affine(1), Affine(500)), 4),))
    plans = [plan_of(facts, {"data": 4}, zero=zero) for zero in (0, 1, 3)]
    svg = draw(plans).svg
    bars = rects(svg)
    assert len(bars) == 12
    scale = bars[0].w / plans[0].bytes_per_device
    assert plans[0].activation_bytes_per_device == 2 * 500 * 4  # 8 rows on 4 devices
    sizes = []
    for p in plans:
        held = (p.bytes_per_device, p.gradient_bytes_per_device, p.slot_bytes_per_device)
        sizes += [*held, p.activation_bytes_per_device]
    for bar, size in zip(bars, sizes, strict=True):
        assert bar.w == pytest.approx(size * scale, abs=0.02)
        assert bar.title.endswith(f"{size:,} bytes")
    assert {"data=4", "data=4, zero 1", "data=4, zero 3"} <= set(texts(svg))
    assert "Activations: an estimate, for a batch of 8 rows" in said(svg)


def test_the_line_of_a_devices_memory(plan) -> None:
    total = plan.bytes_per_device + plan.gradient_bytes_per_device + plan.slot_bytes_per_device
    svg = draw({"all": plan}, device_memory=total / 2).svg
    bars = rects(svg)
    dashed = [e for e in root(svg).iter(f"{NAMESPACE}polyline") if e.get("stroke-dasharray")]
    (line,) = (float(e.get("points", "").split(",")[0]) for e in dashed)
    assert line == pytest.approx((bars[0].x + bars[-1].x + bars[-1].w) / 2, abs=0.1)
    assert f"{size_text(total)}: 2.0 x a device" in texts(svg)
    assert "x a device" not in said(draw([plan], device_memory=2 * total).svg)
    for wrong in (0, -1, float("inf"), float("nan"), True, "80GB"):
        with pytest.raises(DrawingError, match="give the bytes that a device has"):
            draw([plan], device_memory=wrong)


# ledgers ----------------------------------------------------------------------------------------------------------


def test_a_ledgers_bars_have_the_lengths_of_their_bytes(plan) -> None:
    svg = draw(plan.predicted).svg
    bars = [(bar.title.partition(":")[0], bar.w) for bar in rects(svg)]
    sums = {"all_reduce over model": 0.0, "all_reduce over data": 0.0}
    for op, axes, _, _, size in plan.predicted.rows():
        sums[f"{op} over {axes}"] += size
    most = max(sums.values())
    for name, size in sums.items():
        assert dict(bars)[name] == pytest.approx(470 * size / most, rel=0.01)
    assert "up_0: all_reduce over model" in texts(svg)
    behind = texts(svg)[texts(svg).index("By purpose, the largest first") + 1 :]
    assert [text.partition(":")[0] for text in behind[::2]] == ["gradients", "down_0", "up_0"]
    assert "Nothing was sent." in texts(draw(Ledger()).svg)


def test_purposes_beyond_the_largest_are_summed() -> None:
    plan = plan_of(chain(20), {"model": 2})
    assert f"{len(plan.predicted.rows()) - 10} more" in texts(draw(plan.predicted).svg)


# markup -----------------------------------------------------------------------------------------------------------


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data) -> None:
        self.text += data


def test_names_of_layers_make_no_markup() -> None:
    plan = plan_of(chain(1, EVIL), {"data": 2, "model": 2})
    for svg in (draw(plan).svg, draw({EVIL[0]: plan}).svg, draw(plan.predicted).svg):
        tags = {element.tag.removeprefix(NAMESPACE) for element in root(svg).iter()}
        assert tags <= {"svg", "title", "desc", "style", "rect", "text", "polyline", "defs", "pattern"}
        assert "<script>alert(1)</script>_" in "".join(root(svg).itertext())
    for page in (report(plan), plan._repr_html_(), plan.predicted._repr_html_()):
        reader = _Reader()
        reader.feed(page)
        assert "script" not in {tag for tag, _ in reader.tags}
        assert "b" not in {tag for tag, _ in reader.tags}
        assert "<script>alert(1)</script>_0" in reader.text
        assert "\x00" not in page
        assert "\u202e" not in page


def test_the_report_needs_nothing_from_elsewhere(plan) -> None:
    page = report(plan)
    reader = _Reader()
    reader.feed(page)
    for _, attributes in reader.tags:
        assert not {"src", "href", "srcset", "onload", "onclick"} & set(attributes)
    assert "@import" not in page
    assert set(re.findall(r"url\(([^)]*)", page)) == set()
    assert set(re.findall(r"[a-z]+://[^\"']*", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    for row in plan.rows:
        assert row.path in reader.text
        assert row.reason in reader.text
    assert [tag for tag, _ in reader.tags].count("svg") == 3
    assert "prefers-color-scheme:dark" in page


def test_notebooks_show_pictures_and_tables_and_print_shows_text(plan) -> None:
    assert plan._repr_svg_() == draw(plan).svg
    assert plan.predicted._repr_svg_() == draw(plan.predicted).svg
    assert draw(plan).svg in plan._repr_html_()
    assert "column: first of a pair with down_0" in plan._repr_html_()
    assert str(plan) == plan.show()
    assert "all_reduce" in plan.predicted._repr_html_()

"""Pictures of arrays: rectangles in the proportions of shards, each rank named, what is not seen said in words."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import unidist
from tests.drawing.svg import NAMESPACE, ranks_of, rects, root, said, texts
from unidist import DistributedArray, DrawingError, Layout, LayoutError, Mesh, draw
from unidist.algebra import Sharding, redistribution

MESH = Mesh({"data": 2, "model": 3})
CASES = [
    (Layout(), (6, 9)),
    (Layout("data"), (5,)),
    (Layout("data"), (7, 4)),
    (Layout("data", "model"), (7, 10)),
    (Layout(("data", "model")), (13, 4)),
    (Layout(None, "model", "data"), (4, 7, 6)),
    (Layout("data", partial="model"), (3, 8)),
    (Layout(partial=("data", "model")), (3, 8)),
]


@pytest.mark.parametrize(("layout", "shape"), CASES, ids=str)
def test_blocks_have_the_areas_of_shards_and_name_every_rank(layout, shape) -> None:
    sharding = Sharding(MESH, layout, shape)
    blocks = rects(draw(sharding).svg)
    whole = sum(block.area for block in blocks)
    parts = {rank: block for block in blocks for rank in ranks_of(block.title)}
    held = {rank: sharding.elements(rank) for rank in MESH.devices}
    assert set(parts) == {rank for rank in held if held[rank]}
    total = np.prod(shape)
    for rank, block in parts.items():
        assert block.area / whole == pytest.approx(held[rank] / total, rel=0.01)
    # They fill one rectangle.
    width = max(block.x + block.w for block in blocks) - min(block.x for block in blocks)
    height = max(block.y + block.h for block in blocks) - min(block.y for block in blocks)
    assert whole == pytest.approx(width * height, rel=0.001)
    for one, other in itertools.combinations(blocks, 2):
        assert min(one.x + one.w, other.x + other.w) - max(one.x, other.x) < 0.1 or (
            min(one.y + one.h, other.y + other.h) - max(one.y, other.y) < 0.1
        )


@pytest.mark.parametrize(("layout", "shape"), CASES, ids=str)
def test_ranks_that_hold_the_same_share_a_block(layout, shape) -> None:
    sharding = Sharding(MESH, layout, shape)
    regions = {sharding.region(rank) for rank in MESH.devices if sharding.elements(rank)}
    assert len(rects(draw(sharding).svg)) == len(regions)


def test_an_empty_shard_is_said() -> None:
    assert "rank 3: an empty shard" in said(draw(Layout("data"), mesh=Mesh({"data": 4}), shape=(6, 2)).svg)
    both = [
        text
        for text in texts(draw(Layout("data", "model"), mesh=MESH, shape=(2, 2)).svg)
        if "elements" in text or "empty" in text
    ]
    assert ["empty" in text for text in both] == [False] * 4 + [True] * 2
    nothing = draw(Layout("data"), mesh=Mesh({"data": 2}), shape=(0, 2)).svg
    assert "no elements" in said(nothing)
    assert rects(nothing) == []


def test_replicas_and_summands_are_told_apart() -> None:
    mesh = Mesh({"data": 2, "model": 2})
    whole = draw(Layout(None, "model"), mesh=mesh, shape=(4, 4)).svg
    assert "ranks 0, 2" in texts(whole)
    assert "pattern" not in whole
    summed = draw(Layout(None, partial="model"), mesh=mesh, shape=(4, 4)).svg
    assert "ranks (0, 2) + (1, 3)" in texts(summed)
    assert len(root(summed).findall(f"{NAMESPACE}defs/{NAMESPACE}pattern")) == 1
    striped = [e for e in root(summed).iter(f"{NAMESPACE}rect") if e.get("fill", "").startswith("url(")]
    # The block, and its square in the list.
    assert len(striped) == 2
    assert float(striped[0].get("width", "")) == rects(summed)[0].w
    largest = draw(Layout(partial={"model": "max"}), mesh=mesh, shape=(4, 4)).svg
    assert "ranks (0, 2) max (1, 3)" in texts(largest)


def test_dims_that_are_not_drawn_are_named() -> None:
    svg = draw(Layout("data", None, "model"), mesh=MESH, shape=(4, 5, 6)).svg
    assert "Dim 1, of 5, is whole and not drawn." in texts(svg)
    assert any(text.startswith("dim 2 of 6, cut by 'model'") for text in texts(svg))
    three = draw(Layout("a", "b", "c"), mesh=Mesh({"a": 2, "b": 2, "c": 2}), shape=(4, 4, 4)).svg
    assert "ranks 0 | 1" in texts(three)
    assert "Dim 2 is cut too, by 'c'" in said(three)


def test_many_replicas_are_named_in_short() -> None:
    mesh = Mesh({"data": 8, "model": 8})
    svg = draw(Layout(None, "model"), mesh=mesh, shape=(4, 800)).svg
    blocks = rects(svg)
    assert [sorted(ranks_of(block.title)) for block in blocks] == [list(range(k, 64, 8)) for k in range(8)]
    assert "ranks 3-59 by 8: dim 0 [0:4], dim 1 [300:400], 400 elements" in texts(svg)
    assert "3-59 by 8" in texts(svg)
    mixed = Mesh({"data": 8, "model": 8}, devices=sorted(range(64), key=lambda rank: rank * 37 % 61))
    assert texts(draw(Layout(None, "model"), mesh=mixed, shape=(4, 800)).svg).count("8 ranks") == 8


def test_elements_are_those_of_all_dims() -> None:
    blocks = rects(draw(Layout("data", None, "model"), mesh=MESH, shape=(4, 5, 6)).svg)
    assert all(block.title.endswith(", 20 elements") for block in blocks)
    cut = Mesh({"a": 2, "b": 2, "c": 2})
    assert all(
        block.title.endswith(", 16 elements")
        for block in rects(draw(Layout("a", "b", "c"), mesh=cut, shape=(4, 4, 8)).svg)
    )


def test_scalars_and_devices_in_another_order() -> None:
    assert "ranks 0, 1" in texts(draw(Layout(), mesh=Mesh({"data": 2}), shape=()).svg)
    turned = rects(draw(Layout("data"), mesh=Mesh({"data": 2}, devices=[1, 0]), shape=(4,)).svg)
    assert [(block.title.partition(":")[0], block.x) for block in turned] == sorted(
        ((block.title.partition(":")[0], block.x) for block in turned), reverse=True
    )


def test_an_array_is_drawn_as_its_layout() -> None:
    unidist.use("sim", devices=4)
    x = unidist.distribute(np.zeros((8, 4), "float16"), Mesh({"data": 4}), ("data",))
    assert isinstance(x, DistributedArray)
    assert draw(x).svg == draw(x.layout, mesh=x.mesh, shape=(8, 4), dtype="float16").svg == x._repr_svg_()
    assert "16 B on the device that holds most." in texts(draw(x).svg)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout("data"), Layout()),
        (Layout(partial="data"), Layout("data")),
        (Layout("data"), Layout(None, "data")),
        (Layout("data", partial="model"), Layout(None, ("model", "data"))),
        (Layout("data", "model"), Layout("model", "data")),
    ],
    ids=str,
)
def test_a_redistribution_names_each_step_with_its_bytes(before, after) -> None:
    mesh = Mesh({"data": 2, "model": 2})
    source = Sharding(mesh, before, (8, 12))
    picture = draw(source, to=after)
    words = said(picture.svg)
    way = redistribution(source, source.with_layout(after))
    assert len(way) > 0
    for step in way:
        assert step.op in words
        assert f"over {', '.join(step.axes)}" in words
        if step.is_collective:
            assert f"{step.bytes(4, 0)} B a rank" in words
    assert f"{way.bytes(4, 0)} B sent by each rank in all" in words
    # Each state in between is drawn: its blocks name all ranks.
    assert sum(len(ranks_of(block.title)) for block in rects(picture.svg)) == mesh.size * (len(way) + 1)


def test_the_same_layout_needs_nothing() -> None:
    assert "Nothing is to be done" in said(draw(Layout("data"), to=Layout("data"), mesh=MESH, shape=(4,)).svg)


def test_several_arrays_are_named() -> None:
    some = {"x & y": Sharding(MESH, Layout("data"), (4,)), "<z>": Sharding(MESH, Layout("model"), (6, 2))}
    assert {"x & y", "<z>"} <= set(texts(draw(some).svg))


def test_meshes_have_each_rank_at_its_place() -> None:
    places = rects(draw(MESH).svg)
    assert [place.title for place in places] == [
        f"rank {rank}: data {rank // 3}, model {rank % 3}" for rank in range(6)
    ]
    assert len({place.y for place in places}) == 2
    assert MESH._repr_svg_() == draw(MESH).svg
    assert Mesh({"data": 5000})._repr_svg_() is None


def test_what_cannot_be_drawn_is_an_error_that_says_what_can() -> None:
    for wrong, words in (
        (lambda: draw(3), "draw of int: give an array"),
        (lambda: draw([]), "draw of a list of nothing"),
        (lambda: draw([1, "x"]), "draw of a list of int, str"),
        (lambda: draw(Layout("data")), "write draw"),
        (lambda: draw(Layout("data"), mesh=MESH), "write draw"),
        (lambda: draw(MESH, shape=(3,)), "and Mesh has its own"),
        (lambda: draw(MESH, to=Layout()), "to=Layout() is for arrays"),
        (lambda: draw(MESH, device_memory=1e9), "is for bars of memory"),
        (lambda: draw({"a": Sharding(MESH, Layout(), (2,))}, to=Layout()), "one array at a time"),
        (lambda: draw(Layout(), mesh=MESH, shape=(2,), dtype="floaty"), "give the name of a dtype"),
        (lambda: draw(Layout("data"), mesh=Mesh({"data": 5000}), shape=(2,)), "4096 at most"),
        (lambda: draw(Mesh({"data": 5000})), "4096 at most"),
    ):
        with pytest.raises(DrawingError) as caught:
            wrong()
        assert words in str(caught.value)
    with pytest.raises(LayoutError):
        draw(Layout("data", "data2"), mesh=MESH, shape=(2, 2))


def test_a_redistribution_ends_with_what_was_asked_for() -> None:
    source, after = Sharding(MESH, Layout("data"), (6, 6)), Layout(None, "data")
    blocks = [block.title for block in rects(draw(source, to=after).svg)]
    first = [block.title for block in rects(draw(source).svg)]
    last = [block.title for block in rects(draw(source.with_layout(after)).svg)]
    assert blocks[: len(first)] == first
    assert blocks[-len(last) :] == last

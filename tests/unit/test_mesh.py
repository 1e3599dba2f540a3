"""Mesh: places, groups and the texts of its errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from unidist.algebra import Mesh, Sharding
from unidist.algebra.mesh import set_world
from unidist.array import as_mesh
from unidist.errors import LayoutError, MeshError

PERMUTED = Mesh({"a": 2, "b": 3, "c": 2}, devices=[7, 0, 11, 3, 2, 5, 1, 4, 10, 6, 9, 8])


@pytest.fixture
def six_devices() -> Iterator[None]:
    set_world(lambda: [f"cpu:{k}" for k in range(6)])
    yield
    set_world(None)


def test_places_are_row_major_over_the_devices_as_given() -> None:
    grid = np.reshape(PERMUTED.devices, PERMUTED.shape)
    for place in itertools.product(range(2), range(3), range(2)):
        coordinate = dict(zip("abc", place, strict=True))
        assert PERMUTED.rank_at(coordinate) == grid[place]
        assert PERMUTED.coordinate(int(grid[place])) == coordinate


@pytest.mark.parametrize("axes", [("a",), ("b",), ("b", "a"), ("a", "b"), ("c", "b", "a"), ("a", "c")], ids=str)
def test_a_group_is_the_ranks_along_its_axes_in_the_order_of_the_axes(axes: tuple[str, ...]) -> None:
    grid = np.reshape(PERMUTED.devices, PERMUTED.shape)
    rest = [k for k, name in enumerate("abc") if name not in axes]
    rows = np.transpose(grid, [*rest, *("abc".index(name) for name in axes)]).reshape(-1, PERMUTED.axis_size(axes))
    assert set(PERMUTED.groups(axes)) == {tuple(int(rank) for rank in row) for row in rows}
    for rank in PERMUTED.devices:
        group = PERMUTED.group(axes, rank)
        assert group.ranks in PERMUTED.groups(axes)
        assert group.ranks[group.index] == rank
        assert group.size == PERMUTED.axis_size(axes)


def test_meshes_are_equal_by_axes_order_and_devices() -> None:
    mesh = Mesh({"a": 2, "b": 2})
    assert mesh == Mesh({"a": 2, "b": 2}, [0, 1, 2, 3])
    assert hash(mesh) == hash(Mesh({"a": 2, "b": 2}))
    others = [Mesh({"a": 2, "b": 2}, [0, 2, 1, 3]), Mesh({"b": 2, "a": 2}), Mesh({"a": 2, "c": 2}), Mesh({"a": 4})]
    assert all(mesh != other for other in others)


def test_the_world_fills_an_open_axis_and_names_its_devices(six_devices: None) -> None:
    assert Mesh({"data": -1, "model": 3}).shape == (2, 3)
    assert Mesh({"x": 2}, ["cpu:4", "cpu:1"]).devices == (4, 1)
    assert Mesh({"x": -1}, [5, 3, 1]).shape == (3,)
    assert repr(Mesh({"x": 2}, [1, 0])) == "Mesh({'x': 2}, devices=[1, 0])"
    with pytest.raises(MeshError, match=r"6 devices cannot fill .*: 4 does not divide 6"):
        Mesh({"data": -1, "model": 4})
    with pytest.raises(MeshError, match=r"unknown device 'gpu:0': the world has \['cpu:0'"):
        Mesh({"x": 1}, ["gpu:0"])
    with pytest.raises(MeshError, match=r"found \{'x': 6\}: write unidist\.Mesh\(\{'x': 6\}\)"):
        as_mesh({"x": 6})


@pytest.mark.parametrize(
    ("axes", "devices", "text"),
    [
        ({}, None, "at least one axis"),
        ({"x": 0}, None, "axis 'x' has size 0: it must be a whole number from 1"),
        ({"x": 1.5}, None, r"axis 'x' has size 1\.5"),
        ({"x": -2}, None, "or -1 for the rest"),
        ({"": 2}, None, "non-empty string"),
        ({"x": -1, "y": -1}, None, r"only one size may be -1, found \['x', 'y'\]"),
        ({"x": -1}, None, r"unidist\.use"),
        ({"x": 2}, [0, 1, 2], r"has 2 places, but 3 devices were given"),
        ({"x": 2}, [1, 1], "given twice"),
        ({"x": 2}, [0, -1], "a rank from 0, found -1"),
        ({"x": 2}, ["cpu:0", "cpu:1"], r"choose a backend first: unidist\.use"),
        ({"x": 2}, 2, "devices must be a list of names or ranks"),
        ({"x": 2}, "cpu:0", "devices must be a list of names or ranks"),
        ({"x": 2}, [0, True], "a rank from 0, found True"),
        ({"x": True}, None, "axis 'x' has size True: it must be a whole number"),
        ({"x": 10**12}, None, r"has 1000000000000 places, more than the 1048576 that .* a number of devices"),
        ([("a", 2), ("a", 2)], None, "axis 'a' is named twice in .*: each axis has a name of its own"),
        ("data", None, "a mesh is made of names and sizes, as .* found 'data'"),
        (4, None, "a mesh is made of names and sizes, as .* found 4"),
    ],
)
def test_errors_say_what_was_found_and_what_to_do(axes: Any, devices: Any, text: str) -> None:
    with pytest.raises(MeshError, match=text):
        Mesh(axes, devices)


def test_unknown_axes_and_ranks_are_refused() -> None:
    mesh = Mesh({"data": 2, "model": 2})
    with pytest.raises(MeshError, match=r"unknown axis 'pipe': the mesh has {'data': 2, 'model': 2}"):
        mesh.axis_size("pipe")
    with pytest.raises(MeshError, match=r"named by a string, found 3: the mesh has {'data': 2, 'model': 2}"):
        mesh.axis_size(3)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"a Sharding is of a Mesh, a Layout and a shape, found .*'data'"):
        Sharding(mesh, "data", (2,))  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="named twice"):
        mesh.group(("data", "data"), 0)
    with pytest.raises(MeshError, match="rank 4 is not in"):
        mesh.coordinate(4)
    for place in ({"data": 2, "model": 0}, {"data": -1, "model": 0}, {"data": 0}):
        with pytest.raises(MeshError, match=r"has no place {'data': .*: name a place of each axis, from 0"):
            mesh.rank_at(place)

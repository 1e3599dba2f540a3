"""Sharding: the part of every rank, against chunking NumPy arrays again and again."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.algebra import Layout, Mesh, Sharding, chunk
from unidist.errors import LayoutError
from unidist.propagation.layouts import chunked
from unidist.testing import samples

MESH = Mesh({"a": 2, "b": 3, "c": 2}, devices=[7, 0, 11, 3, 2, 5, 1, 4, 10, 6, 9, 8])
LAYOUTS = list(samples.layouts(MESH.axis_names, 2))


@pytest.mark.parametrize(
    ("size", "parts", "lengths"),
    [
        (6, 3, [2, 2, 2]),
        (7, 3, [3, 3, 1]),
        (4, 3, [2, 2, 0]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
        (1, 4, [1, 0, 0, 0]),
        (0, 2, [0, 0]),
        (5, 1, [5]),
    ],
)
def test_chunks_are_ceil_sized_and_the_last_may_hold_nothing(size: int, parts: int, lengths: list[int]) -> None:
    assert [length for _, length in chunk(size, parts)] == lengths


@given(st.integers(0, 200), st.integers(1, 40))
def test_chunks_join_to_the_whole(size: int, parts: int) -> None:
    joined = [k for start, length in chunk(size, parts) for k in range(start, start + length)]
    assert joined == list(range(size))
    assert len(chunk(size, parts)) == parts


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LAYOUTS), st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_the_region_of_a_rank_is_nested_chunking(layout: Layout, shape: tuple[int, int]) -> None:
    sharding = Sharding(MESH, layout, shape)
    value = np.arange(shape[0] * shape[1]).reshape(shape)
    for rank in MESH.devices:
        wanted = value[samples.nested_chunks(sharding, rank)]
        np.testing.assert_array_equal(value[sharding.slices(rank)], wanted)
        assert sharding.local_shape(rank) == wanted.shape
        assert sharding.elements(rank) == wanted.size


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LAYOUTS), st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_the_parts_cover_the_value_once_for_each_replica(layout: Layout, shape: tuple[int, int]) -> None:
    sharding = Sharding(MESH, layout, shape)
    seen = np.zeros(shape, int)
    for rank in MESH.devices:
        seen[sharding.slices(rank)] += 1
    copies = MESH.size // (MESH.axis_size(layout.sharded_axes) if layout.sharded_axes else 1)
    assert (seen == copies).all()


@settings(max_examples=200, deadline=None)
@given(st.permutations("abc"), st.integers(1, 3), st.integers(0, 40))
def test_pieces_are_the_lengths_of_the_group_in_order(order: list[str], count: int, size: int) -> None:
    axes = tuple(order)
    sharding, minor = Sharding(MESH, Layout(axes), (size,)), axes[-count:]
    for rank in MESH.devices:
        ranks = MESH.group(minor, rank).ranks
        assert sharding.pieces(rank, 0, minor) == tuple(sharding.local_shape(r)[0] for r in ranks)


def test_is_even_tells_whether_all_ranks_hold_the_same() -> None:
    for layout, shape in itertools.product(LAYOUTS, [(12, 12), (6, 4), (5, 12), (0, 7)]):
        sharding = Sharding(MESH, layout, shape)
        if sharding.is_even:
            assert len({sharding.local_shape(rank) for rank in MESH.devices}) == 1
    assert not Sharding(MESH, Layout("b"), (7,)).is_even
    assert Sharding(MESH, Layout("b"), (6,)).is_even


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutError, match="names axis 'z'"):
        Sharding(MESH, Layout("z"), (4,))
    with pytest.raises(LayoutError, match="shards dim 0 of a tensor that has 0 dims"):
        Sharding(MESH, Layout("a"), ())


def test_what_is_sent_to_another_process_is_known_there() -> None:
    """Strings have other hashes there: none that was found here goes along."""
    mesh = Mesh({"data": 2})
    for value in (mesh, Layout("data"), Sharding(mesh, Layout("data"), (4,))):
        hash(value)
        sent = pickle.loads(pickle.dumps(value))
        assert sent == value
        assert hash(sent) == hash(value)
        assert set(vars(pickle.loads(pickle.dumps(value)))) == {field.name for field in fields(value)}


def test_ranks_share_what_names_a_size_for_each_of_them() -> None:
    """Each of a thousand ranks would make a thousand sizes, in each step."""
    assert chunk(4099, 1024) is chunk(4099, 1024)
    assert chunked(0, 4099, 1024) is chunked(0, 4099, 1024)

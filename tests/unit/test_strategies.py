"""Strategies: the three layouts of a variable."""

import pytest

from unidist.algebra import Layout, Mesh
from unidist.errors import MeshError
from unidist.strategies import Strategy
from unidist.strategies.strategy import choose_axes
from unidist.strategies.zero import spread

GRID = Mesh({"data": 2, "model": 2}, devices=range(4))


def test_data_parallel_stores_replicas_and_computes_fanned_out() -> None:
    found = Strategy(GRID, ("data",)).variable("kernel", (4, 6))
    assert (found.storage, found.compute, found.state) == (Layout(), Layout(fanout="data"), Layout())


@pytest.mark.parametrize("zero", [1, 2])
def test_sharded_states_leave_the_storage_whole(zero: int) -> None:
    found = Strategy(GRID, ("data",), zero=zero).variable("kernel", (4, 6))
    assert (found.storage, found.compute, found.state) == (Layout(), Layout(fanout="data"), Layout("data"))


def test_sharded_values_rest_where_their_states_live() -> None:
    found = Strategy(GRID, ("data",), zero=3).variable("kernel", (4, 6))
    assert (found.storage, found.compute, found.state) == (Layout("data"), Layout(fanout="data"), Layout("data"))


def test_stages_combine_with_a_rule_of_the_model_axis() -> None:
    rule = {"kernel": Layout("model")}
    found = Strategy(GRID, ("data",), lambda path, shape: rule[path], zero=3).variable("kernel", (8, 6))
    assert (found.storage, found.compute) == (Layout(("model", "data")), Layout("model", fanout="data"))
    found = Strategy(GRID, ("data",), lambda path, shape: rule[path], zero=1).variable("kernel", (6, 4))
    assert (found.storage, found.state) == (Layout("model"), Layout("model", "data"))


@pytest.mark.parametrize(
    ("shape", "uneven", "wanted"),
    [
        ((4, 6), False, Layout("data")),
        ((3, 6), False, Layout(None, "data")),
        ((3, 5), False, Layout()),
        ((3, 5), True, Layout(None, "data")),
        ((1,), True, Layout("data")),
        ((), True, Layout()),
        ((0, 4), True, Layout(None, "data")),
    ],
)
def test_the_dim_that_is_cut(shape: tuple[int, ...], uneven: bool, wanted: Layout) -> None:
    assert spread(Layout(), shape, ("data",), GRID, uneven=uneven) == wanted


def test_the_dim_with_the_largest_parts_is_cut_unevenly() -> None:
    assert spread(Layout("model"), (10, 7), ("data",), GRID, uneven=True) == Layout("model", "data")


def test_nothing_is_cut_over_an_axis_of_one_place() -> None:
    flat = Mesh({"data": 1, "model": 4})
    assert spread(Layout(), (4, 6), ("data",), flat, uneven=True) == Layout()


@pytest.mark.parametrize(
    ("axes", "named", "wanted"),
    [
        (("rows", "columns"), (None, None), (("rows",), ("columns",))),
        (("model", "data"), (None, None), (("data",), ("model",))),
        (("model",), (None, None), ((), ("model",))),
        (("a", "b"), ("b", None), (("b",), ("a",))),
        (("a", "b"), (None, "a"), (("b",), ("a",))),
        (("a", "b", "c"), ("a", "c"), (("a",), ("c",))),
    ],
)
def test_the_axes_of_a_mesh_are_data_or_model_by_name_or_by_order(
    axes: tuple[str, ...], named: tuple[str | None, str | None], wanted: tuple[tuple[str, ...], ...]
) -> None:
    assert choose_axes(Mesh(dict.fromkeys(axes, 2), range(2 ** len(axes))), *named) == wanted


@pytest.mark.parametrize(
    ("axes", "named", "wanted"),
    [
        (("data", "expert"), (None, None), (("data", "expert"), ())),
        (("expert", "model"), (None, None), (("expert",), ("model",))),
        (("data", "expert", "model"), ("data", None), (("data",), ("model",))),
        (("data", "expert"), (None, "expert"), (("data",), ("expert",))),
    ],
)
def test_an_axis_of_experts_cuts_the_batch_unless_others_are_named(
    axes: tuple[str, ...], named: tuple[str | None, str | None], wanted: tuple[tuple[str, ...], ...]
) -> None:
    mesh = Mesh(dict.fromkeys(axes, 2), range(2 ** len(axes)))
    assert choose_axes(mesh, *named, expert_axes=("expert",)) == wanted


def test_kernels_that_an_axis_of_experts_cuts_are_not_fanned_out_over_it() -> None:
    mesh = Mesh({"data": 2, "expert": 2})
    found = Strategy(
        mesh, ("data", "expert"), lambda path, shape: Layout("expert"), zero=3, expert_axes=("expert",)
    ).variable("kernels", (4, 6, 8))
    assert found.compute == Layout("expert", fanout="data")
    assert found.storage == found.state == Layout(("expert", "data"))


def test_an_axis_is_not_for_data_and_model() -> None:
    with pytest.raises(MeshError, match="axis 'data' cannot be both"):
        choose_axes(GRID, "data", ("data", "model"))


def test_a_rule_that_uses_the_data_axis_is_left_as_it_is() -> None:
    assert spread(Layout(None, "data"), (4, 4), ("data",), GRID, uneven=True) == Layout(None, "data")


def test_unknown_stages_and_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zero=4: a stage of ZeRO is one of \(0, 1, 2, 3\)"):
        Strategy(GRID, ("data",), zero=4)
    with pytest.raises(ValueError, match=r"zero=True: a stage of ZeRO"):
        Strategy(GRID, ("data",), zero=True)
    with pytest.raises(MeshError):
        Strategy(GRID, ("rows",))


def test_where_a_dim_takes_one_axis_the_data_axis_cuts_another() -> None:
    def states(layout: Layout, shape: tuple[int, ...]) -> Layout:
        return Strategy(GRID, ("data",), lambda path, shape: layout, zero=1, joint=False).variable("v", shape).state

    assert states(Layout("model"), (8, 6)) == Layout("model", "data")
    assert states(Layout(None, "model"), (8, 6)) == Layout("data", "model")
    assert states(Layout("model"), (8, 3)) == Layout("model")
    assert states(Layout("model"), (8,)) == Layout("model")


@pytest.mark.parametrize("zero", [1, 3])
def test_shards_are_cut_over_the_axes_that_are_named(zero: int) -> None:
    mesh = Mesh({"replica": 2, "shard": 4})
    found = Strategy(mesh, ("replica", "shard"), zero=zero, shard_axes=("shard",)).variable("kernel", (8, 3))
    assert found.state == Layout("shard")
    assert found.storage == (Layout("shard") if zero == 3 else Layout())
    assert found.compute == Layout(fanout=("replica", "shard"))


def test_a_shard_axis_that_cuts_no_rows_is_refused() -> None:
    mesh = Mesh({"data": 2, "model": 2})
    with pytest.raises(MeshError, match="shard_axis='model': the data axes of"):
        Strategy(mesh, ("data",), zero=1, shard_axes=("model",))


@pytest.mark.parametrize("named", ["other", 3, ("shard", "shard")])
def test_what_names_no_shard_axis_is_refused_as_any_axis_is(named: object) -> None:
    with pytest.raises(MeshError, match=r"unknown axis|named by a string|named twice"):
        Strategy(Mesh({"replica": 2, "shard": 2}), ("replica", "shard"), zero=1, shard_axes=named)  # type: ignore[arg-type]


def test_shard_axes_have_one_form() -> None:
    mesh, data = Mesh({"replica": 2, "shard": 4}), ("replica", "shard")
    assert Strategy(mesh, data, zero=1, shard_axes="shard") == Strategy(mesh, data, zero=1, shard_axes=("shard",))
    assert Strategy(mesh, data, zero=1, shard_axes=("shard", "replica")) == Strategy(mesh, data, zero=1)

"""What compiled programs communicate, read back: real programs with known answers, and every way to write groups."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import unidist
from tests import preloaded
from tests.visible import QUICK_JAX
from unidist.algebra import Layout, Mesh, Sharding, redistribution
from unidist.backends.jax.hlo import CompiledCollective, collectives_of, events_of
from unidist.backends.jax.hlo_groups import groups_of, pairs_of
from unidist.testing.processes import ProcessWorld

MESH = Mesh({"a": 2, "b": 4})
PERMUTED = Mesh({"a": 2, "b": 4}, devices=[3, 1, 0, 2, 7, 6, 5, 4])


@pytest.fixture(scope="module")
def eight() -> Iterator[ProcessWorld]:
    with ProcessWorld(1, launcher=None, env=QUICK_JAX, setup=start, preload=preloaded.JAX) as world:
        yield world


def start() -> None:
    unidist.use("jax", devices=8)


# Programs, compiled in a process with eight devices


def _read(function: Any, *arguments: Any) -> list[CompiledCollective]:
    return collectives_of(jax.jit(function).lower(*arguments).compile().as_text(), 8)


def _put(mesh: Mesh, shape: tuple[int, ...], *spec: Any) -> jax.Array:
    native = unidist.backend().mesh(mesh)
    return jax.device_put(np.ones(shape, "float32"), NamedSharding(native, PartitionSpec(*spec)))


def data_parallel_gradient() -> list[CompiledCollective]:
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    return _read(gradient, _put(MESH, (16, 32)), _put(MESH, (8, 16), ("a", "b")))


def tensor_parallel_product(mesh: Mesh) -> list[CompiledCollective]:
    return _read(jnp.matmul, _put(mesh, (8, 16), "a", "b"), _put(mesh, (16, 32), "b"))


def _mapped(mesh: Mesh, body: Any, shape: tuple[int, ...], spec: Any, out: Any) -> list[CompiledCollective]:
    native = unidist.backend().mesh(mesh)
    function = jax.shard_map(body, mesh=native, in_specs=spec, out_specs=out, check_vma=False)
    return _read(function, _put(mesh, shape, *spec))


def by_hand(name: str, mesh: Mesh) -> list[CompiledCollective]:
    """One collective of 16 floats along "b", from a program that asks for just that."""
    ring = [(k, (k + 1) % 4) for k in range(4)]
    bodies = {
        "all_reduce": lambda x: lax.psum(x, "b"),
        "all_gather": lambda x: lax.all_gather(x, "b", tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, "b", tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, "b", 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, "b", ring),
    }
    spec, out = PartitionSpec(), PartitionSpec()
    if name == "all_gather":
        spec = PartitionSpec("b")
    if name == "reduce_scatter":
        out = PartitionSpec("b")
    return _mapped(mesh, bodies[name], (16,), spec, out)


def in_a_scan(length: int) -> list[CompiledCollective]:
    native = unidist.backend().mesh(MESH)

    def run(weights: jax.Array, x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            rows = lax.with_sharding_constraint(carry @ weights, NamedSharding(native, PartitionSpec("a")))
            return jnp.tanh(rows), None

        return lax.scan(step, x, None, length=length)[0]

    return _read(run, _put(MESH, (16, 16), "b"), _put(MESH, (8, 16), "a"))


def in_two_scans() -> list[CompiledCollective]:
    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.psum(x, "b") * 0.1, None

    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(lax.scan(inner, x, None, length=3)[0]), None

    return _mapped(MESH, lambda x: lax.scan(outer, x, None, length=5)[0], (16,), PartitionSpec("a"), PartitionSpec("a"))


def in_an_unknown_loop() -> list[CompiledCollective]:
    def body(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda v: v[0] < 100, lambda v: lax.psum(v, "b") + 1, x)

    return _mapped(MESH, body, (16,), PartitionSpec(), PartitionSpec())


def in_a_branch() -> list[CompiledCollective]:
    def body(x: jax.Array) -> jax.Array:
        return lax.cond(x[0] > 0, lambda v: lax.psum(v, "b"), lambda v: v * 2, x)

    return _mapped(MESH, body, (16,), PartitionSpec(), PartitionSpec())


def a_sort() -> list[CompiledCollective]:
    return _read(jnp.sort, _put(MESH, (64,), ("a", "b")))


def redistributed(src: Sharding, dst: Sharding) -> list[CompiledCollective]:
    backend: Any = unidist.backend()
    x = backend.distribute(np.ones(src.shape, "float32"), src)
    return _read(lambda x: backend.redistribute(x, src, dst), x)


# What is read


def test_a_data_parallel_gradient_is_one_all_reduce_of_its_bytes(eight: ProcessWorld) -> None:
    (found,) = eight.call(data_parallel_gradient)[0]
    assert (found.op, found.group_size, found.count, found.is_exact) == ("all_reduce", 8, 1, True)
    assert found.bytes == Fraction(2 * 7, 8) * 16 * 32 * 4
    assert "transpose(jvp" in found.purpose
    (event,) = events_of([found], MESH, rank=3)
    assert (event.axes, set(event.ranks), event.bytes) == (("a", "b"), set(range(8)), found.bytes)


@pytest.mark.parametrize("mesh", [MESH, PERMUTED], ids=["rank order", "permuted"])
def test_a_tensor_parallel_product_reduces_along_its_axis(eight: ProcessWorld, mesh: Mesh) -> None:
    found = eight.call(tensor_parallel_product, mesh)[0]
    (event,) = events_of(found, mesh, rank=1)
    assert (event.op, event.axes, event.ranks) == ("all_reduce", ("b",), mesh.group("b", 1).ranks)
    assert event.bytes == Fraction(2 * 3, 4) * 4 * 32 * 4


BYTES = {
    "all_reduce": Fraction(2 * 3, 4) * 64,
    "all_gather": Fraction(3, 4) * 64,
    "reduce_scatter": Fraction(3, 4) * 64,
    "all_to_all": Fraction(3, 4) * 64,
    "permute": Fraction(64),
}


@pytest.mark.parametrize("mesh", [MESH, PERMUTED], ids=["rank order", "permuted"])
@pytest.mark.parametrize("name", BYTES)
def test_each_collective_is_read_with_its_ring_bytes(eight: ProcessWorld, name: str, mesh: Mesh) -> None:
    (found,) = eight.call(by_hand, name, mesh)[0]
    assert (found.op, found.count, found.bytes) == (name, 1, BYTES[name])
    (event,) = events_of([found], mesh, rank=5)
    assert (event.op, event.axes, event.ranks) == (name, ("b",), mesh.group("b", 5).ranks)
    assert event.bytes == BYTES[name]


@pytest.mark.parametrize("length", [2, 7])
def test_a_loop_counts_its_trips(eight: ProcessWorld, length: int) -> None:
    (found,) = eight.call(in_a_scan, length)[0]
    assert (found.op, found.count, found.is_exact) == ("all_reduce", length, True)
    assert found.bytes == length * Fraction(2 * 3, 4) * 4 * 16 * 4
    assert len(events_of([found], MESH, rank=0)) == length
    assert sum(event.bytes for event in events_of([found], MESH, rank=0)) == found.bytes


def test_loops_in_loops_multiply(eight: ProcessWorld) -> None:
    found = eight.call(in_two_scans)[0]
    assert sum(one.count for one in found) == 15
    assert all(one.is_exact for one in found)


@pytest.mark.parametrize("program", [in_an_unknown_loop, in_a_branch])
def test_what_may_run_more_or_less_often_says_so(eight: ProcessWorld, program: Any) -> None:
    (found,) = eight.call(program)[0]
    assert (found.op, found.count, found.is_exact) == ("all_reduce", 1, False)


def test_groups_along_a_mesh_of_the_partitioners(eight: ProcessWorld) -> None:
    (found,) = eight.call(a_sort)[0]
    assert (found.op, found.bytes) == ("all_gather", Fraction(7, 8) * 64 * 4)
    assert sorted(found.groups[0]) == list(range(8))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Layout("a"), Layout()),
        (Layout(partial="b"), Layout()),
        (Layout(partial=("a", "b")), Layout(("b", "a"))),
        (Layout(("a", "b")), Layout("a", "b")),
        (Layout("a", "b"), Layout()),
    ],
    ids=str,
)
def test_what_redistribute_compiles_to_is_what_the_plan_predicts(eight: ProcessWorld, src: Layout, dst: Layout) -> None:
    there, here = (Sharding(PERMUTED, layout, (16, 8)) for layout in (src, dst))
    events = events_of(eight.call(redistributed, there, here)[0], PERMUTED, rank=2)
    predicted = [(step.op, set(step.axes), step.bytes(4, 2)) for step in redistribution(there, here).collectives]
    assert [(event.op, set(event.axes), event.bytes) for event in events] == predicted


# The ways to write groups

COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true", COLUMNS),
        ("replica_groups={}, to_apply=%add", (tuple(range(8)),)),
        ("channel_id=1", (tuple(range(8)),)),
        ("replica_groups=[2,4]<=[8]", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", COLUMNS),
        ("replica_groups=[1,8]<=[8]", (tuple(range(8)),)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", ROWS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("replica_groups=mesh['a'=2,'one'=1,'b'=4] {'one'}", tuple((k,) for k in range(8))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", COLUMNS),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}, x={}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}", ((7, 6, 5, 4), (3, 2, 1, 0))),
    ],
)
def test_every_way_to_write_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert groups_of(text, 8) == groups


def test_groups_in_an_unknown_form_are_an_error() -> None:
    with pytest.raises(ValueError, match="unknown form of replica groups"):
        groups_of("replica_groups=<strange>", 8)


def test_pairs_of_a_permute() -> None:
    assert pairs_of("channel_id=1, source_target_pairs={{0,1},{1,2},{2,0}}") == ((0, 1), (1, 2), (2, 0))
    found = CompiledCollective("permute", ((0, 1), (1, 1)), 40, 1, True, "")
    assert [found.bytes_of(place) for place in range(3)] == [40, 0, 0]


# Forms that this machine's compiler does not make

ASYNCHRONOUS = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2]{0})->f32[8]{0}}

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  ROOT %s = bf16[] add(%x, %x)
}

%wrapped (p: s4[7]) -> s4[7] {
  %p = s4[7]{0:T(128)(8,1)} parameter(0)
  ROOT %cb = s4[7]{0} collective-broadcast(%p), channel_id=9, replica_groups={{0,1,2,3}}
}

ENTRY %main (a: f32[2], b: bf16[4,2], c: s4[7]) -> f32[8] {
  %a = f32[2]{0} parameter(0)
  %b = bf16[4,2]{1,0} parameter(1)
  %c = s4[7]{0} parameter(2)
  %ags = (f32[2]{0}, f32[8]{0}) all-gather-start(%a), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %ars = (bf16[4,2]{1,0}, bf16[4,2]{1,0}) all-reduce-start(%b, bf16[4,2]{1,0} %b), replica_groups={}, to_apply=%add
  %cps = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{2,3}}
  %cpd = f32[2]{0} collective-permute-done(%cps)
  %as = ((s4[7]{0}), s4[7]{0}, u32[]) async-start(%c), calls=%wrapped
  %au = ((s4[7]{0}), s4[7]{0}, u32[]) async-update(%as), calls=%wrapped
  %ad = s4[7]{0} async-done(%au), calls=%wrapped
  %ard = (bf16[4,2]{1,0}, bf16[4,2]{1,0}) all-reduce-done(%ars)
  ROOT %agd = f32[8]{0} all-gather-done(%ags), metadata={op_name="jit(f)/(odd, name"}
}
"""


def test_an_asynchronous_collective_counts_once() -> None:
    found = collectives_of(ASYNCHRONOUS, 4)
    assert [(one.op, one.full_bytes, one.group_size, one.count) for one in found] == [
        ("all_gather", 32, 4, 1),
        ("all_reduce", 32, 4, 1),
        ("permute", 8, 2, 1),
        ("broadcast", 4, 4, 1),
    ]
    mesh = Mesh({"x": 2, "y": 2}, devices=range(4))
    assert [event.axes for event in events_of(found, mesh, rank=3)] == [("x", "y"), ("x", "y"), ("y",), ("x", "y")]
    assert [event.bytes for event in events_of(found, mesh, rank=3)] == [24, 48, 0, 3]


def test_a_text_without_an_entry_is_an_error() -> None:
    with pytest.raises(ValueError, match="no HLO module"):
        collectives_of("nothing", 8)

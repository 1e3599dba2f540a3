"""The laws of a plan, over every pair of layouts on small meshes, and planted mistakes that they must catch.

Value: what is gathered does not change. Replica: what a layout calls equal is equal, every shard has its shape.
Adjoint: <A x, y> = <x, A* y>. Bytes: what the arrays weigh by the closed forms of the ring. Chain: each step is a row
of the table, from the layout that the one before it left.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import sampling
from unidist.algebra import Mesh, Redistribution, Sharding, Step, redistribution
from unidist.algebra import sharding as sharding_module
from unidist.algebra import step as step_module
from unidist.algebra.layout import REDUCE_OPS
from unidist.backends.sim import reference
from unidist.testing import samples

SMALL = Mesh({"a": 2, "b": 3})
PERMUTED = Mesh({"a": 2, "b": 3}, devices=[4, 0, 5, 2, 1, 3])
DEEP = Mesh({"a": 2, "b": 2, "c": 3})
LINEAR = ("sum", "mean")
# Which state of an axis each op takes and gives.
TABLE = {
    "all_reduce": {("P", "I"), ("P", "F")},
    "reduce_scatter": {("P", "S")},
    "all_gather": {("S", "I"), ("S", "F")},
    "all_to_all": {("S", "S")},
    "slice": {("I", "S"), ("F", "S")},
    "embed": {("S", "P")},
    "mask": {("I", "P"), ("F", "P")},
    "retype": {("I", "F"), ("F", "I")},
    "scale": {("P", "P"), ("F", "F")},
}
CLOSED_FORM: dict[str, Callable[[int, int, int], Fraction]] = {
    "all_reduce": lambda n, held, after: Fraction(2 * (n - 1) * held, n),
    "reduce_scatter": lambda n, held, after: Fraction((n - 1) * held, n),
    "all_gather": lambda n, held, after: Fraction((n - 1) * after, n),
    "all_to_all": lambda n, held, after: Fraction((n - 1) * held, n),
}


# The laws ----------------------------------------------------------------------------------------------------------


def obey_chain(moves: Redistribution) -> None:
    now = moves.src
    for step in moves:
        assert step.before == now
        for axis in step.axes:
            assert (step.before.layout.state(axis), step.after.layout.state(axis)) in TABLE[step.op]
        for axis in set(now.mesh.axis_names) - set(step.axes):
            assert step.before.layout.state(axis) == step.after.layout.state(axis)
        now = step.after
    assert now == moves.dst


def obey_value_and_replica(src: Sharding, dst: Sharding, rng: np.random.Generator, dtype: str = "float64") -> None:
    value, shards = samples.legal_shards(src, rng, dtype)
    before = {rank: shard.copy() for rank, shard in shards.items()}
    out = reference.run(redistribution(src, dst), shards)
    for rank, shard in before.items():
        np.testing.assert_array_equal(shards[rank], shard)
    for rank, shard in out.items():
        assert shard.dtype == value.dtype
        # 1e-6 for means of three only: every other value is a small whole number and exact.
        here = contribution(out, dst, rank)
        np.testing.assert_allclose(here, value[samples.nested_chunks(dst, rank)], rtol=1e-6, atol=1e-6)
        assert shard.shape == value[samples.nested_chunks(dst, rank)].shape
        for other in dst.mesh.devices:
            mine, theirs = dst.mesh.coordinate(rank), dst.mesh.coordinate(other)
            differ = [axis for axis in mine if mine[axis] != theirs[axis]]
            if all(dst.layout.state(axis) in ("I", "F") for axis in differ):
                np.testing.assert_array_equal(shard, out[other])


def contribution(shards: dict[int, Any], sharding: Sharding, rank: int) -> Any:
    """What the ranks that share this rank's part make of it: one reduction over all partial axes."""
    ranks = sharding.mesh.group(sharding.layout.partial_axes, rank).ranks
    stack = np.stack([shards[r] for r in ranks])
    if not sharding.layout.partial:
        return stack[0]
    kinds = dict(sharding.layout.partial)
    if stack.dtype == bool:
        return stack.any(axis=0)
    if set(kinds.values()) <= set(LINEAR):
        means = [axis for axis, op in kinds.items() if op == "mean"]
        return stack.sum(axis=0) / (sharding.mesh.axis_size(tuple(means)) if means else 1)
    return {"max": np.max, "min": np.min, "prod": np.prod}[next(iter(kinds.values()))](stack, axis=0)


def obey_adjoint(src: Sharding, dst: Sharding, rng: np.random.Generator) -> None:
    moves = redistribution(src, dst)
    obey_chain(moves.adjoint)
    back = dst.with_layout(dst.layout.dual())
    _, x = samples.legal_shards(src, rng)
    _, y = samples.legal_shards(back, rng)
    forward, gradient = reference.run(moves, x), reference.run(moves.adjoint, y)
    left, right = samples.product(forward, y, dst), samples.product(x, gradient, src)
    assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


def obey_bytes(src: Sharding, dst: Sharding, rng: np.random.Generator) -> None:
    _, shards = samples.legal_shards(src, rng)
    for step in redistribution(src, dst):
        after = reference.run_step(step, shards)
        for rank in src.mesh.devices:
            n = step.group_size
            form = CLOSED_FORM.get(step.op, lambda *_: Fraction(0))
            assert step.bytes(8, rank) == form(n, shards[rank].nbytes, after[rank].nbytes)
        assert step.is_collective == (step.op in CLOSED_FORM and step.group_size > 1)
        shards = after


def obey_all(src: Sharding, dst: Sharding, rng: np.random.Generator) -> None:
    obey_chain(redistribution(src, dst))
    obey_value_and_replica(src, dst, rng)
    obey_adjoint(src, dst, rng)
    obey_bytes(src, dst, rng)


def every_pair(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[tuple[Sharding, Sharding]]:
    kinds = [Sharding(mesh, layout, shape) for layout in samples.layouts(mesh.axis_names, len(shape))]
    return itertools.product(kinds, repeat=2)


def drawn(pairs: Iterable[tuple[Sharding, Sharding]]) -> list[tuple[Sharding, Sharding]]:
    """A quarter of them. A mistake in a row of the table shows in many pairs at once."""
    every = list(pairs)
    return sampling.unless_all(random.Random(sampling.SEED).sample(every, len(every) // 4), every)


# Every pair on a small mesh ----------------------------------------------------------------------------------------

SHAPES = [(), (6,), (5,), (1,), (0,), (6, 12), (5, 7), (2, 13), (0, 4), (1, 1)]
WHOLE = [(), (6,), (5,), (6, 12), (5, 7)]


@pytest.mark.parametrize("mesh", [SMALL, PERMUTED], ids=["rank order", "permuted"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_obeys_every_law(mesh: Mesh, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    pairs = list(every_pair(mesh, shape))
    assert len(pairs) == {0: 81, 1: 289, 2: 729}[len(shape)]
    # All of them where the devices are in order: of dims that divide, and of some that do not.
    for src, dst in pairs if mesh is SMALL and shape in WHOLE else drawn(pairs):
        obey_all(src, dst, rng)


@pytest.mark.parametrize("sizes", [(1, 3), (2, 1), (1, 1)], ids=str)
def test_axes_of_size_one_obey_the_laws_and_send_nothing(sizes: tuple[int, int]) -> None:
    mesh, rng = Mesh(dict(zip("ab", sizes, strict=True))), np.random.default_rng(1)
    for src, dst in every_pair(mesh, (3, 4)):
        obey_all(src, dst, rng)
        if mesh.size == 1:
            assert redistribution(src, dst).collectives == ()


@pytest.mark.parametrize("op", ["mean", "max", "min", "prod"])
def test_other_reductions_keep_the_value(op: Any) -> None:
    rng = np.random.default_rng(2)
    for shape in [(5, 7), (4,), ()]:
        kinds = [Sharding(SMALL, layout, shape) for layout in samples.layouts(("a", "b"), len(shape), op=op)]
        pairs = itertools.product(kinds, repeat=2)
        for src, dst in pairs if op == "mean" else drawn(pairs):
            obey_chain(redistribution(src, dst))
            obey_value_and_replica(src, dst, rng)
            obey_bytes(src, dst, rng)
            if op == "mean":
                obey_adjoint(src, dst, rng)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(REDUCE_OPS, 2)))
def test_a_value_moves_from_one_reduction_to_another(first: Any, second: Any) -> None:
    rng = np.random.default_rng(3)
    sources = [Sharding(SMALL, layout, (5, 7)) for layout in samples.layouts(("a", "b"), 2, op=first)]
    targets = [Sharding(SMALL, layout, (5, 7)) for layout in samples.layouts(("a", "b"), 2, op=second)]
    for src, dst in drawn(itertools.product(sources[::2], targets[1::2])):
        obey_chain(redistribution(src, dst))
        obey_value_and_replica(src, dst, rng)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float16", "float32"])
def test_the_value_is_kept_in_its_own_dtype(dtype: str) -> None:
    rng = np.random.default_rng(4)
    for op in ("sum", "max", "prod") if dtype != "bool" else ("sum",):
        kinds = [Sharding(SMALL, layout, (5, 4)) for layout in samples.layouts(("a", "b"), 2, op=op)]
        for src, dst in drawn(itertools.product(kinds[::2], kinds[1::2])):
            obey_value_and_replica(src, dst, rng, dtype)


# Samples on a deeper mesh ------------------------------------------------------------------------------------------

DEEP_LAYOUTS = {ndim: list(samples.layouts(DEEP.axis_names, ndim)) for ndim in (1, 2, 3)}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_samples_on_three_axes_obey_every_law(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 5, 12, 13]), min_size=1, max_size=3))
    mesh = Mesh(dict(DEEP.axes), devices=data.draw(st.permutations(range(12))))
    src, dst = (Sharding(mesh, data.draw(st.sampled_from(DEEP_LAYOUTS[len(shape)])), tuple(shape)) for _ in range(2))
    obey_all(src, dst, np.random.default_rng(data.draw(st.integers(0, 2**32))))


# Planted mistakes --------------------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def at_rank(change: Callable[[Step, dict[int, Any], int, Any], Any]) -> Patch:
    """Replaces what one rank gets from a step: `change` has the step, the shards, the rank and the right answer."""
    right = reference._at_rank

    def wrong(step: Step, shards: dict[int, Any], rank: int) -> Any:
        return change(step, shards, rank, right(step, shards, rank))

    return lambda patch: patch.setattr(reference, "_at_rank", wrong)


def adjoint_op(row: tuple[str, str, str], op: str) -> Patch:
    right = Step._adjoint_op

    def wrong(self: Step) -> Any:
        axis = self.axes[0]
        found = (self.op, self.before.layout.state(axis), self.after.layout.state(axis))
        return op if found == row else right(self)

    return lambda patch: patch.setattr(Step, "_adjoint_op", wrong)


def chunk_rule(rule: Callable[[int, int], tuple[tuple[int, int], ...]]) -> Patch:
    return lambda patch: patch.setattr(sharding_module, "chunk", rule)


def balanced(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """numpy.array_split's sizes."""
    bounds = [size * k // parts for k in range(parts + 1)]
    return tuple((lo, hi - lo) for lo, hi in itertools.pairwise(bounds))


def next_rank(step: Step, rank: int) -> int:
    group = step.before.mesh.group(step.axes, rank)
    return group.ranks[(group.index + 1) % group.size]


def double_all_reduce(step: Step, shards: Any, rank: int, right: Any) -> Any:
    return right * step.group_size if step.op == "all_reduce" else right


def retype_masks(step: Step, shards: Any, rank: int, right: Any) -> Any:
    return right * 0 if step.op == "retype" and step.before.mesh.group(step.axes, rank).index else right


def swapped_all_to_all(step: Step, shards: Any, rank: int, right: Any) -> Any:
    if step.op != "all_to_all":
        return right
    other = Step("all_to_all", step.axes, step.before, step.after, dim=step.to, to=step.dim)
    return np.concatenate([shards[r] for r in step.before.mesh.group(step.axes, rank).ranks], other.dim)


def slice_of_the_next(step: Step, shards: Any, rank: int, right: Any) -> Any:
    if step.op != "slice":
        return right
    return shards[rank][reference._relative(step.after, step.before, next_rank(step, rank))]


def unscaled(step: Step, shards: Any, rank: int, right: Any) -> Any:
    return shards[rank] if step.op == "scale" else right


def mask_keeps_all(step: Step, shards: Any, rank: int, right: Any) -> Any:
    return shards[rank] if step.op == "mask" else right


def gather_in_reverse(step: Step, shards: Any, rank: int, right: Any) -> Any:
    if step.op != "all_gather":
        return right
    return np.concatenate([shards[r] for r in reversed(step.before.mesh.group(step.axes, rank).ranks)], step.dim)


def scatter_without_sum(step: Step, shards: Any, rank: int, right: Any) -> Any:
    return shards[rank][reference._relative(step.after, step.before, rank)] if step.op == "reduce_scatter" else right


def embed_everywhere(step: Step, shards: Any, rank: int, right: Any) -> Any:
    return right + 1 if step.op == "embed" else right


def mean_scaled_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Step, "factor", property(lambda s: s.group_size ** (-1 if s.before.layout.op_of(s.axes[0]) == "mean" else 1))
    )


def half_the_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(step_module.RING, "all_reduce", lambda n, b: Fraction((n - 1) * b, n))


def first_place_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "reduce", lambda parts, op: parts[0])


MISTAKES: dict[str, Patch] = {
    "all_reduce counts twice": at_rank(double_all_reduce),
    "retype masks": at_rank(retype_masks),
    "all_to_all joins and does not cut": at_rank(swapped_all_to_all),
    "slice takes the next rank's part": at_rank(slice_of_the_next),
    "mean is not scaled": at_rank(unscaled),
    "gradient of a mean is scaled the other way": mean_scaled_back,
    "mask keeps the value everywhere": at_rank(mask_keeps_all),
    "all_gather joins in reverse": at_rank(gather_in_reverse),
    "reduce_scatter does not reduce": at_rank(scatter_without_sum),
    "embed is not among zeros": at_rank(embed_everywhere),
    "reductions take place 0": first_place_only,
    "adjoint of P->I is all_reduce": adjoint_op(("all_reduce", "P", "I"), "all_reduce"),
    "adjoint of P->F is retype": adjoint_op(("all_reduce", "P", "F"), "retype"),
    "adjoint of I->F is mask": adjoint_op(("retype", "I", "F"), "mask"),
    "adjoint of F->I is all_reduce": adjoint_op(("retype", "F", "I"), "all_reduce"),
    "adjoint of S->F is slice": adjoint_op(("all_gather", "S", "F"), "slice"),
    "adjoint of F->S is all_gather": adjoint_op(("slice", "F", "S"), "all_gather"),
    "adjoint of S->I is reduce_scatter": adjoint_op(("all_gather", "S", "I"), "reduce_scatter"),
    "chunks are balanced": chunk_rule(balanced),
    "bytes of all_reduce are halved": half_the_bytes,
}


@pytest.fixture
def cold_caches() -> Iterator[None]:
    caches = [redistribution, sharding_module._region]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_breaks_a_law(mistake: str, monkeypatch: pytest.MonkeyPatch, cold_caches: None) -> None:
    MISTAKES[mistake](monkeypatch)
    op = "mean" if "mean" in mistake else "sum"
    kinds = [Sharding(SMALL, layout, (7, 8)) for layout in samples.layouts(("a", "b"), 2, op=op)]
    with pytest.raises((AssertionError, ValueError)):
        obey_all_pairs(kinds)


def obey_all_pairs(kinds: list[Sharding]) -> None:
    for src, dst in itertools.product(kinds, repeat=2):
        obey_all(src, dst, np.random.default_rng(5))

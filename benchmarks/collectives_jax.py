"""What a collective of the jax backend costs in Python, over the jitted shard_map program that it runs.

    python benchmarks/collectives_jax.py [--devices 8] [--rounds 400]

Raw call and backend call take turns in the same loop (paired), and the median of the differences is printed, in
microseconds. The arrays are small, so that the time is that of the calls; each call is waited for. `jit(x + 1)`, which
sends nothing, shows what of the raw call is JAX's own dispatch. `again` is what a new jit would cost each time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

import unidist
from unidist import Layout, Mesh
from unidist.algebra import Sharding

Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=400)
    given = parser.parse_args()
    unidist.use("jax", devices=given.devices)
    mesh = Mesh({"x": given.devices})
    print(f"{given.devices} virtual CPU devices, median of {given.rounds} paired calls, microseconds")
    print(f"{'collective':16}{'raw':>10}{'backend':>10}{'adds':>8}{'array':>10}{'adds':>8}")
    for name, row in programs(mesh).items():
        raw, backend, over_backend = paired(row[0], row[1], given.rounds)
        _, array, over_array = paired(row[0], row[2], given.rounds)
        print(f"{name:16}{raw:10.1f}{backend:10.1f}{over_backend:8.1f}{array:10.1f}{over_array:8.1f}")
    print(f"jit(x + 1): {alone(plain(mesh), given.rounds):.1f}   again: {alone(jitted_again(mesh), 5):.0f}")


def programs(mesh: Mesh) -> dict[str, tuple[Call, Call, Call]]:
    """name -> the raw program, the backend's call, the call on DistributedArrays."""
    n = mesh.size
    sharded, split, whole = Layout("x"), Layout(None, "x"), Layout()
    spec: dict[Layout, Any] = {sharded: PartitionSpec("x"), split: PartitionSpec(None, "x"), whole: PartitionSpec()}
    ring = [(k, (k + 1) % n) for k in range(n)]

    def row(src: Layout, dst: Layout, body: Callable[[Any], Any], array: Callable[[Any], Any]) -> Any:
        backend: Any = unidist.backend()
        x = unidist.distribute(np.ones((n, n), "float32"), mesh, src)
        there, here = (Sharding(mesh, layout, (n, n)) for layout in (src, dst))
        raw = raw_program(mesh, body, spec[src] if src in spec else PartitionSpec("x"), spec[dst])
        return lambda: raw(x.data), lambda: backend.redistribute(x.data, there, here), lambda: array(x).data

    backend: Any = unidist.backend()
    x = unidist.distribute(np.ones((n, n), "float32"), mesh, sharded)
    moved = raw_program(mesh, lambda v: lax.ppermute(v, "x", ring), spec[sharded], spec[sharded])
    return {
        "all_reduce": row(Layout(partial="x"), whole, lambda v: lax.psum(v[0], "x"), unidist.all_reduce),
        "reduce_scatter": row(
            Layout(partial="x"),
            sharded,
            lambda v: lax.psum_scatter(v[0], "x", tiled=True),
            lambda v: unidist.reduce_scatter(v, "x", 0),
        ),
        "all_gather": row(
            sharded, whole, lambda v: lax.all_gather(v, "x", tiled=True), lambda v: unidist.all_gather(v, "x")
        ),
        "all_to_all": row(
            sharded,
            split,
            lambda v: lax.all_to_all(v, "x", 1, 0, tiled=True),
            lambda v: unidist.all_to_all(v, "x", 1),
        ),
        "permute": (
            lambda: moved(x.data),
            lambda: backend.permute(x.data, x.sharding, ("x",), tuple(ring)),
            lambda: unidist.permute(x, "x", ring).data,
        ),
    }


def raw_program(mesh: Mesh, body: Callable[[Any], Any], src: Any, dst: Any) -> Callable[[Any], Any]:
    native = unidist.backend().mesh(mesh)
    program: Callable[[Any], Any] = jax.jit(
        jax.shard_map(body, mesh=native, in_specs=src, out_specs=dst, check_vma=False)
    )
    return program


def plain(mesh: Mesh) -> Call:
    x = unidist.distribute(np.ones((mesh.size, mesh.size), "float32"), mesh, Layout("x")).data
    program = jax.jit(lambda v: v + 1)
    return lambda: program(x)


def jitted_again(mesh: Mesh) -> Call:
    x = unidist.distribute(np.ones((mesh.size, mesh.size), "float32"), mesh, Layout("x")).data
    return lambda: raw_program(mesh, lambda v: lax.psum(v, "x"), PartitionSpec("x"), PartitionSpec())(x)


def timed(call: Call) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return 1e6 * (time.perf_counter() - begin)


def dispatched(call: Call) -> float:
    """Until the call returns; what it started is waited for outside the measured time."""
    begin = time.perf_counter()
    out = call()
    spent = 1e6 * (time.perf_counter() - begin)
    jax.block_until_ready(out)
    return spent


def paired(raw: Call, ours: Call, rounds: int) -> tuple[float, float, float]:
    """Medians of raw, of ours, and of ours - raw, in turns that change their order."""
    pairs = []
    for k in range(rounds + 20):
        if k % 2:
            first = dispatched(raw)
            pairs.append((first, dispatched(ours)))
        else:
            second = dispatched(ours)
            pairs.append((dispatched(raw), second))
    kept = pairs[20:]
    medians = [statistics.median(column) for column in zip(*kept, strict=True)]
    return medians[0], medians[1], statistics.median(ours - raw for raw, ours in kept)


def alone(call: Call, rounds: int) -> float:
    timed(call)
    return statistics.median(timed(call) for _ in range(rounds))


if __name__ == "__main__":
    main()

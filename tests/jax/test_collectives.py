"""What JAX adds to the laws: jit and grad over distributed arrays, cached programs, padding, dtypes, devices.

The checks run in a process of their own with eight virtual devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import unidist
from tests import preloaded
from tests.support.sampling import unless_all
from tests.visible import QUICK_JAX
from unidist import DistributedArray, Layout, Mesh
from unidist.algebra import Sharding, redistribution
from unidist.backends.jax.hlo import collectives_of
from unidist.backends.sim import reference
from unidist.errors import BackendMismatchError, BackendNotAvailableError, CapabilityError, LayoutError, MeshError
from unidist.testing import samples
from unidist.testing.processes import ProcessWorld

MESH = Mesh({"data": 2, "model": 4}, devices=[3, 1, 0, 2, 7, 6, 5, 4])
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def eight() -> Iterator[ProcessWorld]:
    with ProcessWorld(1, launcher=None, env=QUICK_JAX, setup=start, preload=preloaded.JAX) as world:
        yield world


def start() -> None:
    unidist.use("jax", devices=8)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-5)


def gradient_of(x: DistributedArray, cotangent: DistributedArray) -> DistributedArray:
    """What jax.grad gave for x as an array at the dual layout."""
    backend: Any = unidist.backend()
    dual = x.sharding.with_layout(x.layout.dual())
    return DistributedArray(backend.gradient(cotangent.data, x.sharding), dual, backend)


def sent(function: Callable[..., Any], *arguments: Any) -> list[str]:
    return [one.op for one in collectives_of(jax.jit(function).lower(*arguments).compile().as_text(), 8)]


# Distributed arrays in jit and grad


def a_distributed_array_goes_through_jit() -> None:
    value = normal(11, 7)
    x = unidist.distribute(value, MESH, Layout(("data", "model")))

    @jax.jit
    def moved(x: DistributedArray) -> DistributedArray:
        assert isinstance(x.data, jax.core.Tracer)
        return x.redistribute(Layout(None, "model", partial="data"))

    y = moved(x)
    assert (y.layout, y.shape, y.dtype) == (Layout(None, "model", partial="data"), (11, 7), "float32")
    close(y.numpy(), value)
    (leaf,) = jax.tree.leaves(x)
    assert leaf is x.data


def the_gradient_of_a_sharded_weight_is_that_of_one_device() -> None:
    """ZeRO-3: weights rest sharded, are gathered for the product, and their gradients come back sharded."""
    w1, w2, inputs = normal(10, 12), normal(12, 3), normal(16, 10)

    def plain(weights: Any, inputs: Any) -> Any:
        return jnp.sum(jnp.sin(jnp.tanh(inputs @ weights[0]) @ weights[1]))

    def loss(weights: tuple[DistributedArray, DistributedArray], inputs: DistributedArray) -> Any:
        gathered = [unpadded(w.redistribute(Layout(fanout=("data", "model")))) for w in weights]
        return plain(gathered, inputs.data)

    layouts = Layout(("data", "model")), Layout("model", "data")
    weights = tuple(unidist.distribute(w, MESH, layout) for w, layout in zip((w1, w2), layouts, strict=True))
    x = unidist.distribute(inputs, MESH, Layout(("data", "model")))
    gradients = jax.jit(jax.grad(loss))(weights, x)
    wanted = jax.grad(plain)((w1, w2), inputs)
    for weight, gradient, right in zip(weights, gradients, wanted, strict=True):
        found = gradient_of(weight, gradient)
        assert found.layout == weight.layout
        close(found.numpy(), right)
        assert all(shard.shape != right.shape for shard in found.shards().values())
    ops = sent(jax.grad(loss), weights, x)
    assert {"all_gather", "all_reduce"} <= set(ops)


def unpadded(x: DistributedArray) -> Any:
    assert x.data.shape == x.shape
    return x.data


def the_gradient_through_a_partial_product_is_that_of_one_device() -> None:
    """A product over a sharded dim leaves contributions, summed by what the layout asks for."""
    inputs, weight = normal(8, 16), normal(16, 5)

    def contributions(x: DistributedArray, w: DistributedArray) -> DistributedArray:
        parts = jnp.einsum("bnk,nko->nbo", x.data.reshape(8, 4, 4), w.data.reshape(4, 4, 5))
        return DistributedArray(parts, Sharding(MESH, Layout(partial="model"), (8, 5)), unidist.backend())

    x = unidist.distribute(inputs, MESH, Layout(None, "model"))
    w = unidist.distribute(weight, MESH, Layout("model"))
    right = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(inputs, weight)
    for target in (Layout(), Layout("model"), Layout(("model", "data")), Layout(fanout="model")):
        found = jax.jit(
            jax.grad(lambda x, w, t=target: jnp.sum(jnp.sin(contributions(x, w).redistribute(t).data)), (0, 1))
        )(x, w)
        for array, cotangent, wanted in zip((x, w), found, right, strict=True):
            close(gradient_of(array, cotangent).numpy(), wanted)


def gradients_of_partial_means_and_fanouts() -> None:
    """<gradient, x> over contributions for P, the total for F."""
    for layout in (Layout(partial="data"), Layout(partial={"data": "mean"}), Layout(None, "model", fanout="data")):
        sharding = Sharding(MESH, layout, (6, 5))
        shards = [normal(*sharding.local_shape(rank)) for rank in range(8)]
        if layout.fanout:
            x = unidist.distribute(normal(6, 5), MESH, layout)
        else:
            kept = {MESH.coordinate(rank)["data"]: shards[rank] for rank in range(8)}
            x = unidist.from_local(
                [kept[MESH.coordinate(r)["data"]] for r in range(8)], MESH, layout, shape=sharding.shape
            )
        scale = normal(6, 5)
        cotangent = jax.grad(lambda x, s=scale: jnp.sum(x.redistribute(Layout()).data * s))(x)
        found = gradient_of(x, cotangent)
        assert found.layout == layout.dual()
        share = scale / 2 if dict(layout.partial).get("data") == "mean" else scale
        close(found.numpy(), share)
        backend: Any = unidist.backend()
        again = backend.cotangent(found.data, x.sharding)
        close(again, cotangent.data)


def the_gradient_of_a_gradient_is_right() -> None:
    value, weight = normal(11, 4), normal(11, 4)
    x = unidist.distribute(value, MESH, Layout(("data", "model")))
    gathered = Layout()

    def energy(x: DistributedArray) -> Any:
        return jnp.sum(jnp.sin(x.redistribute(gathered).data) * weight)

    def norm(x: DistributedArray) -> Any:
        found = jax.grad(energy)(x)
        return jnp.sum(found.redistribute(gathered).data ** 3)

    plain = jax.grad(lambda v: jnp.sum(jax.grad(lambda u: jnp.sum(jnp.sin(u) * weight))(v) ** 3))(value)
    close(gradient_of(x, jax.grad(norm)(x)).numpy(), plain)


def a_maximum_has_no_gradient() -> None:
    x = unidist.from_local([normal(3)] * 8, MESH, Layout(partial={"data": "max", "model": "max"}), shape=(3,))
    with pytest.raises(LayoutError, match="max"):
        jax.grad(lambda x: jnp.sum(x.redistribute(Layout()).data))(x)


def whole_numbers_pass_beside_a_gradient() -> None:
    value = normal(16, 4)
    x = unidist.distribute(value, MESH, Layout("data"))

    def loss(x: DistributedArray) -> Any:
        best = DistributedArray(jnp.argmax(x.data, 1), Sharding(MESH, Layout("data"), (16,)), unidist.backend())
        chosen = best.redistribute(Layout()).data
        return jnp.sum(jnp.take_along_axis(x.redistribute(Layout()).data, chosen[:, None], 1) ** 2)

    wanted = np.where(value == value.max(1, keepdims=True), 2 * value, 0)
    close(gradient_of(x, jax.jit(jax.grad(loss))(x)).numpy(), wanted)


def a_gradient_sends_no_more_than_it_must() -> None:
    """A cotangent is the total already: it is cut where the value was joined, and joined where it was cut."""
    backend: Any = unidist.backend()
    model = Layout("model")
    for src, dst, expected in (
        (model, Layout(), []),
        (model, Layout(fanout="model"), []),
        (Layout(partial="model"), Layout(), []),
        (Layout(), model, ["all_gather"]),
        (Layout(partial="model"), model, ["all_gather"]),
        (model, Layout(None, "model"), ["all_to_all"]),
        (Layout(partial=("data", "model")), Layout("data", "model"), ["all_gather", "all_gather"]),
    ):
        there, here = (Sharding(MESH, layout, (16, 8)) for layout in (src, dst))
        x = backend.distribute(normal(16, 8), there)
        y, pull = jax.vjp(lambda x, s=there, d=here: backend.redistribute(x, s, d), x)
        assert sent(pull, jax.device_put(jnp.ones_like(y), y.sharding)) == expected, f"{src} -> {dst}"


# Programs


def a_program_is_compiled_once_and_for_every_dtype_once() -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    layouts = Layout("data", "model"), Layout(None, ("model", "data"))
    for dtype in ("float32", "int32"):
        x = unidist.distribute(np.ones((9, 7), dtype), MESH, layouts[0])
        compiled.clear()
        x.redistribute(layouts[1])
        assert len(compiled) == 1, f"{dtype}: {len(compiled)} programs"
        compiled.clear()
        for _ in range(3):
            again = Mesh(dict(MESH.axes), devices=list(MESH.devices))
            unidist.DistributedArray(x.data, Sharding(again, x.layout, (9, 7)), unidist.backend()).redistribute(
                Layout(None, ("model", "data"))
            )
        assert compiled == []


def results_lie_where_the_layout_says() -> None:
    backend: Any = unidist.backend()
    for layout in (Layout("data"), Layout(None, ("model", "data")), Layout("model", partial="data"), Layout()):
        x = unidist.distribute(normal(16, 8), MESH, Layout("data", "model")).redistribute(layout)
        assert x.data.sharding == backend.layout(x.sharding)
    native = NamedSharding(backend.mesh(MESH), PartitionSpec(None, ("model", "data")))
    assert backend.layout(Sharding(MESH, Layout(None, ("model", "data")), (3, 16))) == native
    assert [device.id for device in backend.mesh(MESH).devices.flat] == list(MESH.devices)


def the_data_of_an_even_layout_is_the_plain_global_array() -> None:
    value = normal(16, 8)
    x = unidist.distribute(value, MESH, Layout("data", "model"))
    np.testing.assert_array_equal(np.asarray(x.data), value)
    assert {shard.data.shape for shard in x.data.addressable_shards} == {(8, 2)}


def a_result_of_jit_that_lies_elsewhere_is_understood() -> None:
    value = normal(16, 8)
    x = unidist.distribute(value, MESH, Layout("data", "model"))
    doubled = jax.jit(lambda x: jax.tree.map(lambda v: jax.device_put(2 * v, jax.devices()[0]), x))(x)
    for rank, shard in doubled.shards().items():
        np.testing.assert_array_equal(shard, 2 * value[x.sharding.slices(rank)])
    np.testing.assert_array_equal(doubled.numpy(), 2 * value)


def collectives_in_a_traced_program_are_not_events() -> None:
    x = unidist.distribute(normal(16, 8), MESH, Layout("data"))
    with unidist.ledger() as book:
        jax.jit(lambda x: x.redistribute(Layout()))(x)
    assert book.count() == 0
    with unidist.ledger() as book:
        x.redistribute(Layout())
    assert book.count("all_gather") == 1


def uneven_parts_go_where_the_reference_puts_them() -> None:
    """Parts that are cut twice do not come one after the other: 9 over 2 and 4 is 2 2 1 0 and 1 1 1 1."""
    both, swapped = ("data", "model"), ("model", "data")
    backend: Any = unidist.backend()
    moves = (
        (Layout(partial=both), Layout(both)),
        (Layout(partial=both), Layout(swapped, None)),
        (Layout("data", partial="model"), Layout(both)),
        (Layout(both), Layout(None, both)),
        (Layout(None, both), Layout(swapped)),
        (Layout(both), Layout("data", "model")),
        (Layout("model", "data"), Layout(("model", "data"))),
        (Layout(both), Layout("data")),
        (Layout(both), Layout("data", partial="model")),
        (Layout(both), Layout(partial=swapped)),
        (Layout("data"), Layout(both)),
        (Layout(), Layout(both)),
        (Layout(partial={"data": "max", "model": "max"}), Layout(both)),
        (Layout(partial={"data": "prod", "model": "prod"}), Layout()),
    )
    shapes = (9, 9), (13, 3), (1, 10)
    for k, (src, dst) in enumerate(moves):
        for shape in unless_all(shapes[k % 3 :][:1], shapes):
            there, here = (Sharding(MESH, layout, shape) for layout in (src, dst))
            _, shards = samples.legal_shards(there, RNG, "float32")
            out = backend.redistribute(backend.from_local([shards[rank] for rank in range(8)], there), there, here)
            wanted = reference.run(redistribution(there, here), shards)
            for rank, shard in backend.to_local(out, here).items():
                np.testing.assert_array_equal(shard, wanted[rank], err_msg=f"{src} -> {dst} of {shape}, rank {rank}")


def what_padding_holds_does_not_count() -> None:
    value, both = normal(9, 3), ("data", "model")
    x = jax.tree.map(lambda data: data + 1, unidist.distribute(value, MESH, Layout(both)))
    for layout in (Layout(partial=both), Layout("data", partial="model"), Layout(None, both), Layout()):
        close(x.redistribute(layout).numpy(), value + 1)


# Values


def values_of_every_kind_are_distributed() -> None:
    for given in (normal(6, 5), jnp.asarray(normal(6, 5)), jax.device_put(normal(6, 5), jax.devices()[5])):
        for layout in (Layout("model"), Layout(None, ("model", "data")), Layout(partial="data"), Layout()):
            close(unidist.distribute(given, MESH, layout).numpy(), given)
    x = unidist.distribute([[1.5, 2], [3, 4]], MESH, Layout("data"))
    assert x.dtype == "float32"
    assert unidist.distribute([1, 2], MESH, Layout("data")).dtype == "int32"
    traced = jax.jit(lambda v: unidist.distribute(v, MESH, Layout(("model", "data"))))(normal(11, 3))
    assert (traced.layout, traced.data.shape) == (Layout(("model", "data")), (16, 3))


def dtypes_of_64_bits_are_refused_and_never_narrowed() -> None:
    for dtype in ("float64", "int64"):
        with pytest.raises(CapabilityError, match=rf"jax.*{dtype}.*cast.*jax_enable_x64"):
            unidist.distribute(np.ones(8, dtype), MESH, Layout("data"))
        with pytest.raises(CapabilityError, match=dtype):
            unidist.from_local([np.ones(4, dtype)] * 8, MESH, Layout("data"))
        assert dtype not in unidist.backend().capabilities.dtypes
    with jax.enable_x64(True):
        assert {"float64", "int64"} <= unidist.backend().capabilities.dtypes
    with pytest.raises(CapabilityError, match="complex64"):
        unidist.distribute(np.ones(8, "complex64"), MESH, Layout("data"))


def mistakes_are_named() -> None:
    backend: Any = unidist.backend()
    x = unidist.distribute(normal(11, 4), MESH, Layout("model"))
    with pytest.raises(LayoutError, match=r"\(11, 4\).*\(12, 4\)"):
        backend.redistribute(jnp.ones((11, 4)), x.sharding, x.sharding.with_layout(Layout()))
    with pytest.raises(LayoutError, match=r"float32.*int32"):
        unidist.from_local([np.ones(2, "float32"), *[np.ones(2, "int32")] * 7], MESH, Layout())
    with pytest.raises(CapabilityError, match="from_local outside"):
        jax.jit(lambda v: unidist.from_local([v] * 8, MESH, Layout()).data)(np.ones(2, "float32"))
    for inside in (lambda x: x.numpy(), lambda x: x.shards()):
        with pytest.raises(CapabilityError, match=r"outside jax\.jit"):
            jax.jit(inside)(x)


# Devices


def devices_are_named_as_keras_does() -> None:
    assert unidist.list_devices() == [f"cpu:{k}" for k in range(8)]
    chosen = unidist.use("jax", devices=["cpu:6", "cpu:1", "cpu:3"])
    try:
        assert chosen.list_devices() == ["cpu:6", "cpu:1", "cpu:3"]
        mesh = Mesh({"x": -1})
        assert [device.id for device in chosen.mesh(mesh).devices.flat] == [6, 1, 3]
        value = normal(7, 2)
        x = unidist.distribute(value, mesh, Layout("x"))
        assert [shard.shape for shard in x.shards().values()] == [(3, 2), (3, 2), (1, 2)]
        assert {shard.device.id for shard in x.data.addressable_shards} == {6, 1, 3}
        np.testing.assert_array_equal(x.numpy(), value)
        with pytest.raises(BackendNotAvailableError, match="no device 'cpu:9'"):
            unidist.use("jax", devices=["cpu:9"]).list_devices()
        with pytest.raises(BackendNotAvailableError, match="no 'abacus' devices"):
            unidist.use("jax", devices=["abacus:0"]).list_devices()
        with pytest.raises(MeshError, match="once"):
            unidist.use("jax", devices=["cpu:1", "cpu:1"]).list_devices()
        with pytest.raises(MeshError, match="devices=0"):
            unidist.use("jax", devices=0)
        with pytest.raises(BackendMismatchError, match=r"started with 8, .*use\(..., devices=4\) before the first JAX"):
            unidist.use("jax", devices=4)
    finally:
        unidist.use("jax", devices=8)


CHECKS = [
    a_distributed_array_goes_through_jit,
    the_gradient_of_a_sharded_weight_is_that_of_one_device,
    the_gradient_through_a_partial_product_is_that_of_one_device,
    gradients_of_partial_means_and_fanouts,
    the_gradient_of_a_gradient_is_right,
    a_maximum_has_no_gradient,
    a_gradient_sends_no_more_than_it_must,
    whole_numbers_pass_beside_a_gradient,
    a_program_is_compiled_once_and_for_every_dtype_once,
    results_lie_where_the_layout_says,
    the_data_of_an_even_layout_is_the_plain_global_array,
    a_result_of_jit_that_lies_elsewhere_is_understood,
    collectives_in_a_traced_program_are_not_events,
    uneven_parts_go_where_the_reference_puts_them,
    what_padding_holds_does_not_count,
    values_of_every_kind_are_distributed,
    dtypes_of_64_bits_are_refused_and_never_narrowed,
    mistakes_are_named,
    devices_are_named_as_keras_does,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_with_eight_devices(eight: ProcessWorld, check: Callable[[], None]) -> None:
    eight.call(check)

"""What the processes of test_experts run: kernels of a stack, each on the rows that it has a weight for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from keras import ops

import unidist
from tests.keras.gated import weighed
from tests.keras.hub import zoo
from unidist.backends.jax.hlo import collectives_of
from unidist.keras.jax.experts import blocks
from unidist.keras.jax.experts.zeros import Known, Zeros

KERNELS, ROWS, WIDTH, HIDDEN = 4, 22, 8, 12


def layer(values: Any, rows: Any) -> Any:
    up, low, down, scale = values
    hidden = jax.nn.gelu(jnp.einsum("td,edh->eth", rows, up) + low[:, None])
    return jnp.einsum("eth,ehd->etd", hidden, down) * scale


def given(routing: str) -> Any:
    """Values, rows and weights. Of "all to one" the last kernel has a weight for all rows, of "none" none has one."""
    rng = np.random.default_rng(0)
    shapes = (KERNELS, WIDTH, HIDDEN), (KERNELS, HIDDEN), (KERNELS, HIDDEN, WIDTH), (WIDTH,)
    values = tuple(jnp.asarray(0.5 * rng.normal(size=shape), "float32") for shape in shapes)
    rows, weights = rng.normal(size=(ROWS, WIDTH)), rng.uniform(0.1, 1, size=(KERNELS, ROWS))
    chosen = {"all to one": np.arange(KERNELS)[:, None] == KERNELS - 1, "none": False}.get(routing)
    weights *= rng.random((KERNELS, ROWS)) < 0.5 if chosen is None else chosen
    return values, jnp.asarray(rows, "float32"), jnp.asarray(weights, "float32")


def meshed(sizes: dict[str, int]) -> Any:
    return jax.sharding.Mesh(np.asarray(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))


def compared(sizes: dict[str, int], kernels: tuple[str, ...], rows: tuple[str, ...], routing: str) -> float:
    """The largest difference from all kernels on all rows: of the sum, and of its gradients."""
    mesh = meshed(sizes) if sizes else None
    plan = blocks.Plan(layer, (True, True, True, False), 3, mesh, kernels, rows)
    values, x, weights = given(routing)
    above = jnp.cos(jnp.arange(ROWS * WIDTH)).reshape(ROWS, WIDTH)

    def both(f: Callable[..., Any]) -> Any:
        return jax.jit(lambda *a: jax.value_and_grad(lambda *b: (f(*b) * above).sum(), argnums=(0, 1, 2))(*a))

    def dense(values: Any, x: Any, weights: Any) -> Any:
        return (layer(values, x) * weights[:, :, None]).sum(0)

    total, (of_values, of_rows, of_weights) = both(lambda *a: blocks.summed(plan, *a))(values, x, weights)
    wanted, (by_values, by_rows, by_weights) = both(dense)(values, x, weights)
    # Zeros have no gradient: it is shown before that they need none.
    found = (total, *of_values, of_rows, of_weights), (wanted, *by_values, by_rows, jnp.where(weights, by_weights, 0))
    return max(float(jnp.abs(a - b).max()) for a, b in zip(*found, strict=True))


def sent() -> dict[str, int]:
    """How many collectives of each name a forward has, where axes cut kernels and rows."""
    mesh = meshed({"data": 2, "expert": 2})
    plan = blocks.Plan(layer, (True, True, True, False), 3, mesh, ("expert",), ("data", "expert"))
    values, x, weights = given("some")
    text = jax.jit(lambda *a: blocks.summed(plan, *a)).lower(values, x[:20], weights[:, :20]).compile().as_text()
    return dict(Counter(one.op for one in collectives_of(text, 4)))


def known(name: str) -> tuple[bool, bool]:
    """Whether zeros of what a router gives have no gradient; whether it is nowhere below zero."""
    program = jax.make_jaxpr(ROUTERS[name])(jnp.ones((6, KERNELS)))
    zeros = Zeros()
    for equation in program.jaxpr.eqns:
        zeros.follow(equation)
    found: Known = zeros.of(program.jaxpr.outvars[0])
    return found.still, found.positive


def _best(scores: Any) -> Any:
    return ops.one_hot(ops.argmax(scores, axis=-1), KERNELS)


def _top(scores: Any) -> Any:
    chances, which = ops.top_k(ops.softmax(scores), 2)
    chances = chances / ops.sum(chances, axis=-1, keepdims=True)
    return ops.sum(ops.one_hot(which, KERNELS) * chances[..., None], axis=1)


def _contracted(scores: Any) -> Any:
    chances, which = ops.top_k(ops.softmax(scores), 2)
    return ops.einsum("tk,tke->te", chances, ops.one_hot(which, KERNELS))


ROUTERS: dict[str, Callable[[Any], Any]] = {
    "top two": lambda s: ops.cast(ops.transpose(_top(s)), "bfloat16"),
    "contracted": _contracted,
    "relu": ops.relu,
    "where": lambda s: ops.where(s > 0.2, ops.softmax(s), 0.0),
    "scores of the best": lambda s: s * _best(s),
    "chances beside scores": lambda s: ops.softmax(s) * _best(s) * 0.0 + s,
    "half": lambda s: ops.cast(ops.softmax(s), "float16"),
    "differences": lambda s: ops.softmax(s) - ops.softmax(2 * s),
    "leaky": ops.leaky_relu,
}


def gated(how: str) -> tuple[float, str]:
    """(the largest difference of weights from one device's, what is said) of a layer with a gate of a kind."""
    wanted, _ = weighed(how, None)
    strategy = unidist.ModelParallel(unidist.Mesh({"data": 2, "model": 2}), experts="dispatch")
    found, said = weighed(how, strategy)
    return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)), said


def of_hub(name: str, sizes: dict[str, int], remat: Any) -> list[str]:
    """What is said of the experts of a backbone that trains as on one device."""
    strategy = unidist.ModelParallel(zoo.mesh(sizes), experts="dispatch", remat=remat)
    found = zoo.train(zoo.BACKBONES[name], strategy)
    zoo.assert_equal(found, zoo.alone(name))
    return [text for path, text in unidist.describe(found.model).why.items() if "expert" in path]

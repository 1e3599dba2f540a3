"""The proof that a program treats each row alone: what does is let through, what does not is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unidist.keras.jax.rowwise import SIZES, is_row_wise

W = np.linspace(-1, 1, 40).reshape(5, 8).astype("float32")
CUBE = np.linspace(-1, 1, 96).reshape(8, 3, 4).astype("float32")


def _norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)


def _recurrent(x: Any) -> Any:
    def step(h: Any, now: Any) -> Any:
        h = jnp.tanh(now @ W + h @ W.T @ W)
        return h, h

    steps = jnp.moveaxis(x[..., :5], 1, 0)
    last, all_of_them = lax.scan(step, jnp.zeros((x.shape[0], 8)), steps)
    return jnp.concatenate([jnp.moveaxis(all_of_them, 0, 1), last[:, None]], axis=1)


def _until(x: Any) -> Any:
    """A loop with a number of turns that no row decides."""
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1]


ALONE: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "dense": (lambda x: jax.nn.relu(x @ W + W[0]), (5,)),
    "dense of sequences": (lambda x: jnp.einsum("bsd,dhk->bshk", x, CUBE), (7, 8)),
    "dense to the left": (lambda x: jnp.einsum("io,bi->bo", W, x), (5,)),
    "attention": (lambda x: jnp.einsum("bst,btd->bsd", jax.nn.softmax(jnp.einsum("bsd,btd->bst", x, x)), x), (4, 3)),
    "norm": (_norm, (6,)),
    "lookup": (lambda x: jnp.take(W, jnp.abs(x * 3).astype(int) % 5, axis=0), (3,)),
    "lookup with out-of-range": (lambda x: jnp.asarray(W).at[x.astype(int)].get(mode="fill", fill_value=jnp.nan), (3,)),
    "columns": (lambda x: x[:, jnp.array([2, 0, 1])], (3,)),
    "each its own place": (lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1)[:, :2], axis=1), (4,)),
    "convolution": (
        lambda x: lax.conv_general_dilated(x, CUBE, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        (9, 3),
    ),
    "convolution by channels": (
        lambda x: lax.conv_general_dilated(
            x, CUBE[:, :1], (2,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2
        ),
        (9, 2),
    ),
    "recurrence": (_recurrent, (4, 6)),
    "a loop": (_until, (3,)),
    "a branch": (lambda x: lax.cond(jnp.sum(W) > 0, jnp.sin, jnp.cos, x), (3,)),
    "along the features": (lambda x: jnp.cumsum(jnp.sort(x, axis=-1), axis=-1)[:, ::-1], (5,)),
    "apart and together": (lambda x: jnp.stack(jnp.unstack(x, axis=1)[::-1], axis=0).swapaxes(0, 1), (3, 2)),
    "flattened": (lambda x: x.reshape(x.shape[0], -1), (2, 3)),
    "heads": (lambda x: x.reshape(x.shape[0], 4, 2, 3).transpose(0, 2, 1, 3), (4, 6)),
    "padded and cut": (lambda x: jnp.pad(x, ((0, 0), (1, 2)), constant_values=2.0)[:, 1:4], (4,)),
    "places": (lambda x: x + jnp.arange(x.shape[1]), (5,)),
    "a mask": (lambda x: jnp.where(x > 0, x, jnp.finfo(x.dtype).min).max(-1, keepdims=True), (5,)),
    "a cut of unknown place": (lambda x: lax.dynamic_slice_in_dim(x, jnp.int32(W[0, 0]) + 2, 2, axis=1), (5,)),
    "constant rows": (lambda x: jnp.concatenate([x, jnp.ones((x.shape[0], 2))], axis=1), (3,)),
    "there and back": (lambda x: (x.T * 2.0).T, (4,)),
    "remembered less": (jax.checkpoint(lambda x: jnp.tanh(x @ W)), (5,)),
    "half precision": (lambda x: (x.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)).astype("float32"), (5,)),
}


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))

MIXING: dict[str, Callable[[Any], Any]] = {
    "the mean of the rows": lambda x: x - x.mean(0),
    "the number of the rows": lambda x: x / x.shape[0],
    "the number of the rows, counted": lambda x: x / jnp.ones(x.shape[0]).sum(),
    "the number of a row": lambda x: x + jnp.arange(x.shape[0])[:, None],
    "the order turned": lambda x: x[::-1],
    "a shift": lambda x: jnp.roll(x, 1, axis=0),
    "all rows but the first": lambda x: x[1:],
    "the row before": lambda x: x + jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "sums along the rows": lambda x: jnp.cumsum(x, axis=0),
    "sorted rows": lambda x: jnp.sort(x, axis=0),
    "softmax over the rows": lambda x: jax.nn.softmax(x, axis=0),
    "products of rows": lambda x: (x @ x.T) @ x,
    "the first row": lambda x: x + x[:1],
    "the first row alone": lambda x: x[:1],
    "some row": lambda x: x + x[jnp.argmax(x[:, 0])],
    "rows looked up": lambda x: x[jnp.abs(x[:, 0]).astype(int) % x.shape[0]],
    "rows in one": lambda x: (x.reshape(-1) * 2.0).reshape(x.shape),
    "rows by features": lambda x: x.T.reshape(x.shape),
    "rows apart and together": lambda x: jnp.stack(jnp.unstack(x, axis=0)[::-1], axis=0),
    "rows stacked": lambda x: jnp.stack([x, x]),
    "twice the rows": lambda x: jnp.concatenate([x, x]),
    "a sum": lambda x: x.sum(),
    "a table": lambda x: (x, jnp.asarray(W)),
    "random numbers": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
    "turns that rows decide": lambda x: lax.while_loop(lambda s: (s < 9).all(), lambda s: s * 2.0 + 1.0, x),
    "a gradient of its own": _clipped,
    "a loop over the rows": lambda x: lax.scan(lambda c, row: (c + row.sum(), row + c), 0.0, x)[1],
    "a branch by number": lambda x: x * 2 if x.shape[0] == SIZES[0] else x * 3,
    "a message": lambda x: (jax.debug.print("{}", x[0, 0]), x)[1],
    "rows as channels": lambda x: (
        lax.conv_general_dilated(
            x.T[None], jnp.ones((1, x.shape[0], x.shape[0])), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )[0].T
    ),
}


def _programs(function: Callable[[Any], Any], *shape: int) -> Any:
    return [jax.make_jaxpr(function)(jax.ShapeDtypeStruct((rows, *shape), "float32")) for rows in SIZES]


@pytest.mark.parametrize("name", ALONE)
def test_what_treats_each_row_alone_is_proven(name: str) -> None:
    function, shape = ALONE[name]
    assert is_row_wise(*_programs(function, *shape))
    x = np.random.default_rng(0).normal(size=(4, *shape)).astype("float32")
    whole = function(x)
    np.testing.assert_allclose(jnp.concatenate([function(x[:3]), function(x[3:])]), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_refused(name: str) -> None:
    assert not is_row_wise(*_programs(MIXING[name], 3))


def test_what_comes_from_another_program_is_refused() -> None:
    found = []

    def outer(y: Any) -> Any:
        found.append(is_row_wise(*_programs(lambda x: x + y, 3)))
        found.append(is_row_wise(*_programs(lambda x: x + 1.0, 3)))
        return y

    jax.make_jaxpr(outer)(jnp.ones(3))
    assert found == [False, True]

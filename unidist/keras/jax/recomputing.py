"""Rematerialization on JAX of layers that draw, keep state, add losses or have masks.

jax.checkpoint takes pure functions of arrays. So what a layer writes in its call is a result of it, and is written
behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from unidist.keras.patching.compat import (
    StatelessScope,
    get_keras_mask,
    get_stateless_scope,
    set_keras_mask,
)


def remat(original: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's remat, of a call that may write. Outside of stateless scopes the call runs as it is."""

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        scope = get_stateless_scope()
        return f(*args, **kwargs) if scope is None else _Call(original, f, scope)(args, kwargs)

    return wrapped


class _Call:
    def __init__(self, original: Any, f: Callable[..., Any], scope: Any) -> None:
        self._original, self._f, self._scope = original, f, scope
        self._loss_ids: list[int] = []

    def __call__(self, args: Any, kwargs: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        before = dict(self._scope.state_mapping)

        def pure(arrays: list[Any], masks: list[Any]) -> Any:
            given = list(leaves)
            for k, array, mask in zip(places, arrays, masks, strict=True):
                given[k] = array
                if mask is not None:
                    set_keras_mask(array, mask)
            own_args, own_kwargs = jax.tree_util.tree_unflatten(structure, given)
            inner = StatelessScope(collect_losses=self._scope.collect_losses, initialize_variables=False)
            inner.state_mapping = dict(before)
            with inner:
                out = self._f(*own_args, **own_kwargs)
            self._loss_ids = [id(loss) for loss in inner.losses]
            written = {key: x for key, x in inner.state_mapping.items() if before.get(key) is not x}
            masks = [get_keras_mask(x) for x in jax.tree_util.tree_leaves(out)]
            return out, masks, written, inner.losses

        arrays = [leaves[k] for k in places]
        out, masks, written, losses = self._original(pure)(arrays, [get_keras_mask(x) for x in arrays])
        for x, mask in zip(jax.tree_util.tree_leaves(out), masks, strict=True):
            if mask is not None:
                set_keras_mask(x, mask)
        self._scope.state_mapping.update(written)
        self._add(losses)
        return out

    def _add(self, losses: list[Any]) -> None:
        """Adds the call's losses, and lets the layers that added them know their own."""
        owner = getattr(self._f, "__self__", None)
        layers = owner._flatten_layers() if owner is not None else []
        for old, loss in zip(self._loss_ids, losses, strict=True):
            self._scope.add_loss(loss)
            for layer in layers:
                if old in layer._loss_ids:
                    layer._loss_ids.add(id(loss))

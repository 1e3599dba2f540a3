"""Declares what JAX can do as it is configured: 64-bit dtypes only with jax_enable_x64."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax

from unidist.backends.jax.devices import config
from unidist.backends.protocol import ALL_DTYPES, Capabilities, DistributionBackend, dtype_name
from unidist.backends.validation import check_dtype

# All that can be moved as JAX's own dtypes.
DTYPES = frozenset(jax.numpy.dtype(name) for name in ALL_DTYPES)
_WIDE = frozenset(("int64", "float64"))


class Configured:
    """The adapter's `capabilities`: what they are now."""

    def __get__(self, instance: object, owner: type) -> Capabilities:
        return _capabilities(bool(config.jax_enable_x64))


@lru_cache(maxsize=2)
def _capabilities(wide: bool) -> Capabilities:
    return Capabilities(view="global", uneven="padded", dtypes=ALL_DTYPES if wide else ALL_DTYPES - _WIDE)


def check_movable(backend: DistributionBackend, x: Any) -> None:
    """Raises CapabilityError where arrays of x's dtype are not moved as JAX is configured."""
    found = dtype_name(x)
    hint = ', or call jax.config.update("jax_enable_x64", True) first' if found in _WIDE else ""
    check_dtype(backend, found, hint)

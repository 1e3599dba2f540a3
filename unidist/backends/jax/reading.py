"""Values that are read to the host: polled for, where JAX would wait for them in C++ without limit.

Read in JAX 0.10.0 to 0.10.2. float(), int(), bool(), str(), np.asarray of an array on several devices of the process,
jax.device_get, pickling and indexing by an array read `ArrayImpl._value`; jax.block_until_ready of one array and the
method call `ArrayImpl.block_until_ready`. What goes by none of them waits as before: np.asarray and memoryview of an
array with one part in this process on CPU (the buffer protocol), dlpack, and jax.block_until_ready of several arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax._src.array import ArrayImpl

from unidist.backends.jax import waiting
from unidist.errors import BackendMismatchError

if TYPE_CHECKING:
    from unidist.backends.jax.joining import Membership

_WHAT = "reading a value"
_found: dict[str, Any] = {}


def watch(world: Membership) -> None:
    """Reads wait no longer than the world's timeout from now on, and end when a process is lost.

    Raises:
        BackendMismatchError: this JAX reads its values elsewhere.
    """
    unwatch()
    array: Any = ArrayImpl
    read, block = vars(array).get("_value"), vars(array).get("block_until_ready")
    if not isinstance(read, property) or block is None:
        raise BackendMismatchError(
            "jax.Array has no _value or block_until_ready, by which unidist notices lost processes: this JAX is not "
            "one that it was made for (0.10)"
        )
    _found.update(_value=read, block_until_ready=block)

    def _value(self: Any) -> Any:
        if self.is_deleted():
            return read.__get__(self)
        waiting.poll(self, world, _WHAT)
        with waiting.lost_in(world, _WHAT):
            return read.__get__(self)

    def block_until_ready(self: Any) -> Any:
        if not self.is_deleted():
            waiting.poll(self, world, _WHAT)
        return block(self)

    array._value = property(_value)
    array.block_until_ready = block_until_ready


def unwatch() -> None:
    """Takes that back."""
    for name in list(_found):
        setattr(ArrayImpl, name, _found.pop(name))

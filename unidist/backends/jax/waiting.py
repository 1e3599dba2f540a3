"""Waits for what other processes take part in, without hanging when one of them is gone.

Values that are read to the host are polled for too, where JAX would wait in C++ without limit. Read in JAX 0.10.0 to
0.10.2. float(), int(), bool(), str(), np.asarray of an array on several devices of the process, jax.device_get,
pickling and indexing by an array read `ArrayImpl._value`; jax.block_until_ready of one array and the method call
`ArrayImpl.block_until_ready`. What goes by none of them waits as before: np.asarray and memoryview of an array with one
part in this process on CPU (the buffer protocol), dlpack, and jax.block_until_ready of several arrays.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax._src.array import ArrayImpl
from jax.errors import JaxRuntimeError

from unidist.backends import joining
from unidist.backends.noting import Kinds, Noted, told
from unidist.errors import BackendMismatchError, ProcessLostError, UnidistError
from unidist.flight.recorder import recorder

if TYPE_CHECKING:
    from unidist.backends.jax.joining import Membership

# What is under way when a process ends may still arrive.
_GRACE = 3.0
_SHORTEST_NAP, _LONGEST_NAP = 0.00005, 0.01
# What is slept past the end of a wait, as a part of it.
_OVERSLEPT = 1 / 16
_OPERATIONS = 2048
_WORDS = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|aborted)|broken pipe|socket closed|unavailable|deadline[_ ]exceeded"
    r"|heartbeat",
    re.IGNORECASE,
)
_READING = "reading a value"
_kinds = Kinds()
# What JAX itself reads values by, while it is watched.
_unwatched: dict[str, Any] = {}
# How XLA's errors begin, in whichever of Python's kinds they come.
_STATUS = re.compile(r"\b[A-Z_]{5,}: ")


def unhurried(x: Any) -> Any:
    """Returns an array that a program gives so that XLA on CPU does not run it in the dispatching thread.

    XLA does so with programs of less than 1000 operations, if one device of the process takes part; the thread then
    waits in C++, without limit, for processes that do not come. Inside jax.jit, for what is whole on every device: the
    first element now depends on some thousand operations, and never changes by them. On accelerators as it is.
    """
    if jax.default_backend() != "cpu" or not x.size or not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        return x
    first = x[(0,) * x.ndim]
    never = jnp.maximum(jnp.real(first).astype(jnp.float32), jnp.arange(_OPERATIONS, dtype=jnp.float32)).sum() < -1
    kept = jnp.where(never, jnp.zeros_like(first), first)
    return jax.lax.dynamic_update_slice(x, kept.reshape((1,) * x.ndim), (0,) * x.ndim)


def until_ready(x: Any, world: Membership, what: str, *, is_noted: bool = False) -> None:
    """Returns when x is computed. `is_noted`: this process's record shows it already.

    Raises:
        ProcessLostError: a process of the world has ended, or did not come within the world's timeout.
    """
    (until_done if is_noted else poll)(x, world, what)
    with lost_in(world, what):
        x.block_until_ready()


def poll(x: Any, world: Membership, what: str) -> None:
    """Returns when x is computed or has failed; JAX itself would wait for it in C++, without limit.

    A wait is noted in this process's record (unidist.flight). Others may find the value ready: a note says nothing of
    members.

    Raises:
        ProcessLostError: a process of the world has ended, or did not come within the world's timeout.
    """
    if world.count > 1 and not x.is_ready():
        with Noted(recorder.kind(what)):
            until_done(x, world, what)


def kind(what: str, world: Membership) -> int:
    """The number by which the record knows what all processes take part in."""
    return _kinds((what, world.count), lambda: told(what, range(world.count), members="process"))


def until_done(x: Any, world: Membership, what: str) -> None:
    """As `poll`, of what the record shows already."""
    if world.count > 1 and not x.is_ready():
        patience = Patience(world, what)
        while not x.is_ready():
            patience.nap()


class Patience:
    """A wait for other processes, slept through in naps."""

    def __init__(self, world: Membership, what: str) -> None:
        self._world = world
        self._what = what
        self._begun = time.monotonic()
        self._ended: float | None = None

    def nap(self) -> None:
        """Sleeps for a part of the wait so far."""
        time.sleep(min(max(self.check() * _OVERSLEPT, _SHORTEST_NAP), _LONGEST_NAP))

    def check(self) -> float:
        """The seconds waited.

        Raises:
            ProcessLostError: a process of the world has ended, or nothing came within the timeout, now or before.
        """
        now, world = time.monotonic(), self._world
        if world.roll is not None and world.roll.given_up:
            raise lost(world, self._what, world.roll.given_up)
        if self._ended is None and world.lost:
            self._ended = now
        if self._ended is not None and now - self._ended > _GRACE:
            raise lost(world, self._what, f"process {', '.join(map(str, world.lost))} has ended")
        if now - self._begun > world.timeout:
            raise lost(world, self._what, f"nothing came for {world.timeout:g} s")
        return now - self._begun


@contextlib.contextmanager
def lost_in(world: Membership | None, what: str) -> Iterator[None]:
    """Inside, an error of XLA's by which another process is gone is a ProcessLostError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if world is not None and (found := loss(error, world, what)) is not None:
            raise found from error
        raise


def loss(error: Exception, world: Membership, what: str) -> ProcessLostError | None:
    """Returns the loss of a process that an error of XLA's stands for, or None.

    The error's kind does not say it, only its words.
    """
    text = str(error)
    if world.count == 1 or isinstance(error, UnidistError):
        return None
    # Programs have errors of their own, with such words in them.
    if not isinstance(error, JaxRuntimeError) and not _STATUS.search(text):
        return None
    if not _WORDS.search(text) and not (world.lost and isinstance(error, JaxRuntimeError)):
        return None
    return lost(world, what, text.splitlines()[0])


def lost(world: Membership, what: str, why: str) -> ProcessLostError:
    """The error that another process is gone. The world is broken from now on."""
    if world.roll is not None:
        world.roll.is_broken = True
        world.roll.given_up = world.roll.given_up or why
    return joining.lost(f"{what} on process {world.index} of {world.count}", why)


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
    _unwatched.update(_value=read, block_until_ready=block)

    def _value(self: Any) -> Any:
        if self.is_deleted():
            return read.__get__(self)
        poll(self, world, _READING)
        with lost_in(world, _READING):
            return read.__get__(self)

    def block_until_ready(self: Any) -> Any:
        if not self.is_deleted():
            poll(self, world, _READING)
        return block(self)

    array._value = property(_value)
    array.block_until_ready = block_until_ready


def unwatch() -> None:
    """Takes that back."""
    for name in list(_unwatched):
        setattr(ArrayImpl, name, _unwatched.pop(name))

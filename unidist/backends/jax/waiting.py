"""Waiting for what other processes take part in, without hanging when one of them is gone."""

from __future__ import annotations

import time
from typing import Any

import jax

from unidist.backends.jax.joining import World
from unidist.errors import ProcessLostError

# What is under way when a process ends may still arrive.
_GRACE = 3.0
_LONGEST_NAP = 0.01
_LOST_WORDS = (
    "gloo",
    "nccl",
    "connection",
    "unavailable",
    "deadline_exceeded",
    "aborted",
    "heartbeat",
    "peer",
    "socket",
)


def until_ready(x: Any, world: World, what: str) -> None:
    """Returns when x is computed.

    Raises:
        ProcessLostError: a process of the world has ended, or did not come within the world's timeout.
    """
    if world.count > 1:
        _poll(x, world, what)
    try:
        x.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        if not any(word in str(error).lower() for word in _LOST_WORDS) or world.count == 1:
            raise
        raise _lost(world, what, str(error).splitlines()[0]) from error


def _poll(x: Any, world: World, what: str) -> None:
    nap, begin, ended = 0.00005, time.monotonic(), None
    while not x.is_ready():
        now = time.monotonic()
        if ended is None and world.lost:
            ended = now
        if ended is not None and now - ended > _GRACE:
            raise _lost(world, what, f"process {', '.join(map(str, world.lost))} has ended")
        if now - begin > world.timeout:
            raise _lost(world, what, f"nothing came for {world.timeout:g} s")
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)


def _lost(world: World, what: str, why: str) -> ProcessLostError:
    return ProcessLostError(
        f"{what} on process {world.index} of {world.count}: another process ended or did not come in time ({why}). "
        "Look at the output of the other processes for the first error; where they were only slow, give "
        "unidist.initialize a longer timeout; then start all processes again"
    )

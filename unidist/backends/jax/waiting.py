"""Waiting for what other processes take part in, without hanging when one of them is gone."""

from __future__ import annotations

import re
import time
from typing import Any

from unidist.backends.jax.joining import World
from unidist.errors import ProcessLostError, UnidistError

# What is under way when a process ends may still arrive.
_GRACE = 3.0
_LONGEST_NAP = 0.01
_WORDS = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|aborted)|broken pipe|socket closed|unavailable|deadline[_ ]exceeded"
    r"|heartbeat",
    re.IGNORECASE,
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
    except (RuntimeError, ValueError) as error:
        if (lost := loss(error, world, what)) is not None:
            raise lost from error
        raise


def loss(error: Exception, world: World, what: str) -> ProcessLostError | None:
    """What an error of XLA's means, if it is that another process is gone: its kinds do not tell, only its words."""
    if world.count == 1 or isinstance(error, UnidistError) or not _WORDS.search(str(error)):
        return None
    return _lost(world, what, str(error).splitlines()[0])


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
    if world.roll is not None:
        world.roll.is_broken = True
    return ProcessLostError(
        f"{what} on process {world.index} of {world.count}: another process ended or did not come in time ({why}). "
        "Look at the output of the other processes for the first error; where they were only slow, give "
        "unidist.initialize a longer timeout; then start all processes again"
    )

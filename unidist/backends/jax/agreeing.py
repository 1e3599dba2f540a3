"""Compares among processes, on the host, what they are about to run together: it must be the same.

A device collective could not do it: it matches nothing where processes disagree, and gives garbage or waits. So each
process says what it has come to in the key-value store of JAX's coordination service; the first of them reads what all
say, and writes it down for the others. Meetings are counted for each set of processes, so that all see the same.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
from jax._src import distributed

from unidist.backends.jax.joining import Membership
from unidist.backends.jax.waiting import Patience, lost_in
from unidist.backends.noting import Kinds, Noted, told
from unidist.errors import BackendMismatchError, DesyncError

# Seconds between looks at who has ended.
_LOOK = 0.25
# Parts that a message names: of those that all have, and of those that some have.
_MOST_PARTS = 4
_kinds = Kinds()
_lock = threading.Lock()
_meetings = SimpleNamespace(client=None, counts=Counter())


def meet(
    world: Membership,
    what: str,
    how: Mapping[str, str],
    processes: Sequence[int],
    devices: Sequence[jax.Device],
    value: str = "",
) -> list[str]:
    """Returns every process's value, when all have come to the same; a lone process's own.

    Args:
        world: of these processes.
        what: this process has come to.
        how: parts of it, by name, that must be the same too. The first ones tell most to a reader.
        processes: those that take part, in order.
        devices: of the world, in rank order, for errors.
        value: of this process, which may differ.

    Raises:
        ProcessLostError: one of them has ended, or did not come within the world's timeout.
        DesyncError: they have come to different things.
    """
    members = tuple(processes)
    if len(members) == 1:
        return [value]
    kind = _kinds((what, members), lambda: told(f"agreeing on {what}", members, members="process"))
    with Noted(kind), lost_in(world, what):
        texts = _exchanged(world, what, json.dumps([what, dict(how), value]), processes)
        return _alike(what, texts, processes, devices)


def _alike(what: str, texts: Sequence[str], processes: Sequence[int], devices: Sequence[jax.Device]) -> list[str]:
    said = [json.loads(text) for text in texts]
    apart = {process for process, other in zip(processes, said, strict=True) if other[:2] != said[0][:2]}
    if not apart:
        return [str(value) for _, _, value in said]
    each = "; ".join(f"process {process} to {told}" for process, told in zip(processes, _told_apart(said), strict=True))
    raise DesyncError(
        f"{what}: the processes have come to different things: {each}. All must come to the same in the same order, "
        "with arrays of the same shapes and dtypes: look for what went another way in one of them, then start all "
        "processes again",
        ranks=tuple(rank for rank, device in enumerate(devices) if device.process_index in apart),
        collective=what,
    )


def _told_apart(said: Sequence[Any]) -> list[str]:
    if len({what for what, _, _ in said}) > 1:
        return [str(what) for what, _, _ in said]
    names = dict.fromkeys(name for _, how, _ in said for name in how)
    differing = [name for name in names if len({how.get(name) for _, how, _ in said}) > 1]
    lacking = [name for name in differing if not all(name in how for _, how, _ in said)]
    differing = [name for name in differing if name not in lacking][:_MOST_PARTS] + lacking[:_MOST_PARTS]
    return [
        f"{what} with {', '.join(f'{name} {how[name]}' for name in differing if name in how) or 'less'}"
        for what, how, _ in said
    ]


def _exchanged(world: Membership, what: str, said: str, processes: Sequence[int]) -> list[str]:
    with _lock:
        store = _store()
        members = "all" if len(processes) == world.count else "-".join(map(str, processes))
        number = _meetings.counts[members] = _meetings.counts[members] + 1
        before, here = (f"unidist/{members}/{k}" for k in (number - 1, number))
        # Patience ends first.
        longest = int(2000 * world.timeout) + 60_000

        def exchange() -> list[str]:
            store.key_value_set(f"{here}/{world.index}", said)
            if world.index != processes[0]:
                return list(json.loads(store.blocking_key_value_get(f"{here}/said", longest)))
            found = [str(store.blocking_key_value_get(f"{here}/{process}", longest)) for process in processes]
            store.key_value_set(f"{here}/said", json.dumps(found))
            # All have come to this meeting, so all have read what was said at the one before.
            store.key_value_delete(before)
            return found

        return _in_time(exchange, Patience(world, what))


def _in_time(call: Callable[[], list[str]], patience: Patience) -> list[str]:
    """Returns what a call gives that waits in C++.

    It runs in a thread that is left behind where this one waits no longer.
    """
    given: list[list[str]] = []
    raised: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            given.append(call())
        except BaseException as error:
            raised.append(error)
        done.set()

    patience.check()
    threading.Thread(target=run, daemon=True, name="unidist-meeting").start()
    while not done.wait(_LOOK):
        patience.check()
    if raised:
        raise raised[0]
    return given[0]


def _store() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise BackendMismatchError(
            "the processes of this world have no coordination service of JAX's, by which unidist compares what they "
            "run: start them with `unidist run --backend jax`, unidist.initialize or jax.distributed.initialize"
        )
    if client is not _meetings.client:
        _meetings.client, _meetings.counts = client, Counter()
    return client

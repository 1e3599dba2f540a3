"""The attempts of a run on several nodes: each launcher goes through the same, as the keeper says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from unidist.backends.environment import join_address, timeout
from unidist.backends.lines import free_port
from unidist.launch.attempt import Ended
from unidist.launch.console import Console
from unidist.launch.keeper import FAILED, Keeper, Terms
from unidist.launch.nodes import Finish, Go, Member, Next, Report
from unidist.launch.request import Request, listening, split_address
from unidist.launch.restarts import told

if TYPE_CHECKING:
    from unidist.launch.run import Run

# Seconds that a launcher that was asked to end waits for the others' verdict.
_FAREWELL = 3.0
# Seconds for which a node that others go on without looks for them.
_REJOIN = 600.0
# Seconds after the timeout: ranks notice by themselves that others are gone, and say in what they needed them.
_AFTER_RANKS = 4.0


def go(
    request: Request,
    attempts: Run,
    console: Console,
    received: Sequence[int],
    give_up: Callable[[], str | None],
) -> int:
    """Runs a node's part. The exit code, which is that of all nodes.

    Raises:
        LaunchError: node 0 cannot listen at the address, or this node does not belong to the run.
    """
    assert request.address is not None
    host, port = split_address(request.address)
    seconds = (request.timeout or timeout()) + _AFTER_RANKS
    fewest = math.ceil((request.min_processes or request.world_size) / request.processes)
    terms = Terms(request.nodes, request.processes, request.backend, seconds, request.max_restarts, fewest)
    words = {
        "node": request.node_rank,
        "nodes": request.nodes,
        "processes": request.processes,
        "backend": request.backend,
    }
    with ExitStack() as stack:
        if request.node_rank == 0:
            server = listening(host, port)
            keeper = Keeper(server, terms, lambda: free_port(server), lambda text: console.say(f"unidist: {text}"))
            stack.callback(keeper.close)
        member = Member((host, port), words, seconds)
        stack.callback(member.close)
        return _Node(request, attempts, console, received, member).go(host, give_up)


class _Node:
    def __init__(
        self, request: Request, attempts: Run, console: Console, received: Sequence[int], member: Member
    ) -> None:
        self._request, self._attempts, self._console = request, attempts, console
        self._received, self._member = received, member
        self._ended: list[Ended] = []

    def go(self, host: str, give_up: Callable[[], str | None]) -> int:
        follows = self._member.start()
        while isinstance(follows, Go):
            address = join_address(host, str(follows.port))
            request = replace(self._request, address=address, nodes=follows.nodes, node_rank=follows.node)
            ended = self._attempts.attempt(request, give_up, self._member, follows.attempt)
            self._ended.append(ended)
            found = self._verdict(ended)
            if found is None:
                return self._attempts.report(ended)
            follows = found
        return self._finish(follows)

    def _verdict(self, ended: Ended) -> Go | Finish | None:
        asked = bool(self._received)
        report = Report(
            code=ended.code,
            what=ended.what,
            has_failed=ended.has_failed,
            is_consequence=ended.is_consequence,
            leaves=asked or (bool(ended.code) and not ended.has_failed),
            progress=ended.progress,
            late=ended.late,
            done=ended.done,
            is_silent=ended.is_silent,
            absent=tuple(rank for rank in ended.done if rank not in ended.flights),
        )
        found = self._member.ended(report, _FAREWELL if asked else None)
        if asked:
            return None
        if found is None and not self._request.max_restarts:
            return Finish(FAILED, self._member.stop or "node 0 is gone")
        if found is None:
            self._console.say(f"unidist: {self._member.stop or 'node 0 is gone'}: it is looked for again")
            # Where the others go on without this node they are there for long.
            return self._member.start(_REJOIN if self._request.min_processes else None)
        if isinstance(found, Finish):
            return found
        self._say(found)
        return self._member.again() if self._attempts.pause(found.pause) else None

    def _say(self, follows: Next) -> None:
        self._console.say(f"unidist: {follows.what}")
        if follows.number:
            self._console.say(f"unidist: {told(follows.number, self._request.max_restarts, follows.pause)}")

    def _finish(self, finish: Finish) -> int:
        own = next((ended for ended in self._ended if ended.what and finish.what.endswith(ended.what)), Ended(0))
        return self._attempts.report(replace(own, code=finish.code, what=finish.what))

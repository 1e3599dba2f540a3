"""Joining a world and losing a process of it: what every backend does and says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unidist.backends.environment import Launch, detect
from unidist.backends.protocol import Cluster
from unidist.errors import BackendMismatchError, BackendNotAvailableError, ProcessLostError


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place in the world that a cluster describes, or else the launcher.

    Attributes:
        address: "host:port" of process 0; "" in a world of one.
        launch: what the launcher says, if there is one.
    """

    count: int
    index: int
    address: str
    launch: Launch | None


def _said(launch: Launch | None) -> str | None:
    return None if launch is None else launch.address


def placed(cluster: Cluster, start: str, address_of: Callable[[Launch | None], str | None] = _said) -> Place:
    """Returns this process's place; in a world of one where nothing says more.

    Args:
        cluster: goes before what the launcher says.
        start: what starts a script, for the error, with {count} for the number of processes.
        address_of: where the launcher's world is met.

    Raises:
        BackendNotAvailableError: nothing says which process this is of several, or where they meet.
    """
    launch = detect()
    count = cluster.process_count or (launch.process_count if launch else 1)
    index = cluster.process_index
    if index is None:
        index = launch.process_index if launch else 0 if count == 1 else None
    address = cluster.address or address_of(launch)
    if index is None or (count > 1 and address is None):
        raise BackendNotAvailableError(
            f"a world of {count} processes needs an address and each process's index: found address {address!r}, index "
            f"{index}. Give unidist.initialize(address, process_count, process_index), or start with "
            f"{start.format(count=count)}"
        )
    return Place(count, index, address if address and count > 1 else "", launch)


def joined_already(index: int, count: int) -> BackendMismatchError:
    """Returns the error of a process that is to join a world while it is in one."""
    return BackendMismatchError(
        f"initialize was called a second time: this is process {index} of {count} already; call unidist.shutdown() "
        "before joining another world"
    )


def check_same(cluster: Cluster, index: int, count: int, found: str, remedy: str) -> None:
    """Raises BackendMismatchError where a cluster contradicts the world that `found` has this process in."""
    if cluster.process_count not in (None, count) or cluster.process_index not in (None, index):
        raise BackendMismatchError(
            f"initialize asks for process {cluster.process_index} of {cluster.process_count}, but {found} as process "
            f"{index} of {count}{remedy}"
        )


def lost(where: str, why: str) -> ProcessLostError:
    """Returns the error of work that another process takes part in, and is gone or does not come.

    Args:
        where: what this process did, and with whom.
        why: how that was noticed.
    """
    return ProcessLostError(
        f"{where}: another process of the group ended or did not come in time ({why}). Look at the output of the other "
        "processes for the first error; where there is none, one ended before this one or is elsewhere in its "
        "program: all must make the same calls in the same order. Where they were only slow, give unidist.initialize "
        "a longer timeout; then start all processes again"
    )

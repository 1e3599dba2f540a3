"""Describes what is to be launched."""

from __future__ import annotations

import errno
import math
import random
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from unidist.backends.environment import join_address
from unidist.backends.lines import family_of
from unidist.errors import UnidistError
from unidist.launch.modules import missing

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Below the range that kernels hand to outgoing connections, so nobody takes the port between its choice and its use.
_PORTS = range(20000, 32000)


class LaunchError(UnidistError, ValueError):
    """A launch that cannot be: counts, node ranks, address or program do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One node's part of a launch.

    Attributes:
        backend: the name given to `unidist.use`.
        command: what follows `python`: ("train.py", "--epochs", "3") or ("-m", "package.module").
        processes: processes on this node.
        nodes: nodes in the world; each has as many processes.
        node_rank: this node's number, 0 to nodes - 1.
        address: "host:port" of node 0. None: one node, and a free port of the loopback.
        devices_per_process: virtual CPU devices (or accelerators) of each process; JAX, and TensorFlow on CPU.
            None: the runtime's own.
        grace: seconds between asking processes to end and killing them.
        timeout: seconds that they wait for each other, at joining and in collectives, and that one may give no sign of
            life. None: as the environment says.
        max_restarts: how often all are started again after one has failed.
        min_processes: how many of all processes the run goes on with at least, where others are lost. None: all.
        log_dir: folder that keeps what each process prints, and its record. None: nothing is kept.

    Raises:
        LaunchError: values that do not fit each other, or a script or module that does not exist.
    """

    backend: str
    command: tuple[str, ...]
    processes: int = 1
    nodes: int = 1
    node_rank: int = 0
    address: str | None = None
    devices_per_process: int | None = None
    grace: float = 5.0
    timeout: float | None = None
    max_restarts: int = 0
    min_processes: int | None = None
    log_dir: str | None = None

    def __post_init__(self) -> None:
        for what, count in (
            ("processes (-n)", self.processes),
            ("nodes", self.nodes),
            ("devices per process", 1 if self.devices_per_process is None else self.devices_per_process),
        ):
            if count < 1:
                raise LaunchError(f"{what} must be 1 or more, got {count}")
        if not 0 <= self.node_rank < self.nodes:
            raise LaunchError(f"node rank {self.node_rank} is not one of 0..{self.nodes - 1} ({self.nodes} nodes)")
        if self.nodes > 1 and self.address is None:
            raise LaunchError(f"{self.nodes} nodes need the address of node 0: --address host:port, the same on each")
        if self.address is not None:
            split_address(self.address)
        if self.grace < 0:
            raise LaunchError(f"grace must be 0 seconds or more, got {self.grace}")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise LaunchError(f"timeout must be seconds above 0, got {self.timeout}")
        if self.max_restarts < 0:
            raise LaunchError(f"max restarts must be 0 or more, got {self.max_restarts}")
        if self.min_processes is not None and not 0 < self.min_processes <= self.world_size:
            raise LaunchError(f"min processes must be 1 to {self.world_size}, which are all, got {self.min_processes}")
        if self.log_dir is not None and Path(self.log_dir).exists() and not Path(self.log_dir).is_dir():
            raise LaunchError(f"the log folder {self.log_dir!r} is a file: give a folder, or a name that is free")
        self._check_command()

    def _check_command(self) -> None:
        if not self.command or self.command == ("-m",):
            raise LaunchError("no program to run: give a script, or -m and a module")
        script = self.command[0]
        if script == "-m":
            name = self.command[1]
            if name.endswith(".py"):
                raise LaunchError(f"-m {name}: that is a file; leave out -m, or write -m {name.removesuffix('.py')}")
            if why := missing(name):
                raise LaunchError(f"{why} (looked from {Path.cwd()}); for a script leave out -m")
        elif not Path(script).exists():
            raise LaunchError(f"no such script: {script!r} (looked from {Path.cwd()}); for a module write -m {script}")

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    def rank(self, local_index: int) -> int:
        """The rank of this node's process number `local_index`."""
        return self.node_rank * self.processes + local_index


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6 address]:port". Raises LaunchError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"address {address!r} must be host:port with a port of 1..65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket at node 0's address; at all of this machine's where only outside leads to it.

    Raises:
        LaunchError: it cannot be listened at.
    """
    try:
        family = family_of((host, port))
    except OSError as error:
        raise LaunchError(f"the address of node 0, {host!r}, leads nowhere from node 0 itself: {error}") from error
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return socket.create_server(("", port), family=family)
        raise LaunchError(f"node 0 cannot listen at {join_address(host, str(port))}: {error.strerror}") from error


def free_port() -> int:
    """A TCP port of the loopback that was free a moment ago. Raises LaunchError where none of many was."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no free port on {LOOPBACK} among 100 tried in {_PORTS.start}..{_PORTS.stop - 1}")

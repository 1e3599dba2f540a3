"""The whole examination: of this machine, and where processes are asked for, of a world of them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from unidist.backends import registry
from unidist.doctor import backends, launchers, machine, network, versions, world
from unidist.doctor.check import Check
from unidist.doctor.matrix import Link
from unidist.doctor.reports import Reports
from unidist.errors import BackendNotAvailableError
from unidist.launch.request import LOOPBACK, Request, split_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Holds what was found.

    Attributes:
        sections: title -> its checks.
        links: the links of the world that was started; none where none was.
        reports: what its processes reported; None where none was started.
    """

    sections: Mapping[str, list[Check]]
    links: tuple[Link, ...] = ()
    reports: Reports | None = None

    @property
    def checks(self) -> Iterator[Check]:
        return (check for section in self.sections.values() for check in section)

    @property
    def failed(self) -> bool:
        return any(check.status == "failed" for check in self.checks)


def examine(request: Request | None, *, say: Callable[[str], None] = lambda text: None) -> Examination:
    """Runs every check. Imports no framework: what needs one runs in processes of its own.

    Args:
        request: of `doctor.request`: the world to start. None: this machine alone, and each backend on it.
        say: called with what is being done now.

    Raises:
        BackendNotAvailableError, CapabilityError, LaunchError: the world cannot be started; the text says why.
    """
    environ = dict(os.environ)
    say("this machine")
    sections = {
        "versions": versions.check(versions.installed(), versions.ranges()),
        "machine": _machine(request, environ),
        "network": _network(request, environ),
        "environment": launchers.check(environ),
    }
    if request is None:
        say("each backend, in a process of its own")
        sections["backends"] = backends.check()
        return Examination(sections=sections)
    say(f"{request.processes} processes of {request.backend}")
    reports = world.run(request)
    sections["world"], links = world.judge(reports)
    return Examination(sections=sections, links=links, reports=reports)


def _machine(request: Request | None, environ: Mapping[str, str]) -> list[Check]:
    processes, size = (1, 1) if request is None else (request.processes, request.world_size)
    return machine.check(machine.look(), environ, processes, size)


def _network(request: Request | None, environ: Mapping[str, str]) -> list[Check]:
    name = socket.gethostname()
    address = "" if request is None else request.address or ""
    used = _installed() if request is None else [request.backend]
    host = split_address(address)[0] if address else LOOPBACK
    try:
        own = network.addresses(name)
    except OSError:  # reported by the check of the hostname
        own = []
    return [
        network.hostname(name, 1 if request is None else request.nodes),
        network.loopback(),
        # Without an address the loopback is taken.
        *([network.meeting_place(address, request)] if request is not None and address else []),
        *network.interfaces(environ, network.cards(), own=own),
        network.proxies(environ, host, used),
    ]


def _installed() -> list[str]:
    found = []
    for name in registry.names():
        with contextlib.suppress(BackendNotAvailableError):
            registry.find(name)
            found.append(name)
    return found

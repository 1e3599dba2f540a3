"""Examines this machine, and a world of real processes, which tries each of its links and reports."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from unidist import launch
from unidist.backends import registry
from unidist.backends.environment import detect, launchers
from unidist.doctor import backends, judging, machine, matrix, network, versions
from unidist.doctor.check import Check, Question
from unidist.doctor.links import Task
from unidist.doctor.matrix import Link
from unidist.doctor.reports import Reports, read
from unidist.errors import BackendNotAvailableError
from unidist.launch import LaunchError, Request
from unidist.launch.request import LOOPBACK, split_address

# What the processes run; the arguments follow.
WORKER = ("-m", "unidist.doctor.worker")
_WORDS = 15
_LAUNCHER = "unidist: "
_IMPORTING, _JOINING = 180.0, 60.0
_MARGIN = 15.0


def request(
    backend: str,
    processes: int,
    *,
    nodes: int = 1,
    node_rank: int = 0,
    address: str | None = None,
    devices_per_process: int | None = None,
    timeout: float = 60.0,
) -> Request:
    """The launch of a world that tries its links. Raises LaunchError: values that do not fit each other."""
    if timeout <= 0:
        raise LaunchError(f"timeout must be more than 0 seconds, got {timeout:g}")
    task = Task(
        backend=backend,
        processes=processes,
        timeout=timeout,
        importing=max(timeout, _IMPORTING),
        joining=max(timeout, _JOINING),
    )
    return Request(
        backend=backend,
        command=(*WORKER, task.write()),
        processes=processes,
        nodes=nodes,
        node_rank=node_rank,
        address=address,
        devices_per_process=devices_per_process,
    )


def run(asked: Request) -> Reports:
    """Starts the world and waits for its end.

    Every step of its processes has a limit. Where none of them has reported anything for longer than the longest, they
    are ended from here.

    Raises:
        BackendNotAvailableError, CapabilityError, LaunchError: it cannot be started (launch.run).
    """
    out, err = _Heard(Task.read(asked.command[-1])), io.StringIO()
    code = launch.run(asked, out=out, err=err, give_up=out.silent_for_too_long)
    lines = err.getvalue().splitlines()
    own = next((line for line in lines if line.startswith(_LAUNCHER)), "").removeprefix(_LAUNCHER)
    return Reports(request=asked, told=read(out.getvalue()), code=code, words=lines[-_WORDS:], launcher=own)


class _Heard(io.StringIO):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self._begun = self._last = time.monotonic()
        self._starting = task.joining + _MARGIN
        self._longest = max(task.importing, task.joining, task.timeout) + task.linger + _MARGIN

    def write(self, text: str) -> int:
        self._last = time.monotonic()
        return super().write(text)

    def silent_for_too_long(self) -> str | None:
        allowed = self._starting if self._last == self._begun else self._longest
        if time.monotonic() - self._last <= allowed:
            return None
        return f"no process said anything for {allowed:g} s"


def judge(reports: Reports) -> tuple[list[Check], tuple[Link, ...]]:
    """The checks of a world that has ended, and its links."""
    links = matrix.links(reports)
    checks = [judging.processes(reports), *judging.same_versions(reports), judging.joining(reports)]
    checks += [
        judging.devices(reports, backends.count_cards()),
        judging.clocks(reports),
        *matrix.check(reports, links),
        *judging.whole_world(reports),
    ]
    return [*checks, *judging.ending(reports, checks)], links


# the whole examination ----------------------------------------------------------------------------------------------


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
        "environment": check(environ),
    }
    if request is None:
        say("each backend, in a process of its own")
        sections["backends"] = backends.check()
        return Examination(sections=sections)
    say(f"{request.processes} processes of {request.backend}")
    reports = run(request)
    sections["world"], links = judge(reports)
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


_QUESTION = Question("launcher", "the variables that launchers set do not contradict each other")


def check(environ: Mapping[str, str]) -> list[Check]:
    """One failed check for each contradiction; else one that says which launcher is seen."""
    wrong = [*_halves(environ), *_beyond(environ), *_two_worlds(environ), *_backend(environ)]
    if wrong:
        return [_QUESTION.failed(found, advice) for found, advice in wrong]
    try:
        launch = detect(environ)
    except BackendNotAvailableError as error:
        return [_QUESTION.failed(str(error), "unset it")]
    found = "no launcher" if launch is None else f"{launch.launcher}: {launch.process_index} of {launch.process_count}"
    return [_QUESTION.ok(found)]


def _halves(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for launcher in launchers().values():
        on_one_host = tuple(filter(None, (launcher.local_index, launcher.local_count)))
        # A job script sets an address of two variables for torchrun and for Slurm.
        address = launcher.address if len(launcher.address) > 1 else ()
        for names, alone, where in (
            ((*launcher.always, *address), address, ""),
            (on_one_host, on_one_host[:1], " on one host"),
        ):
            there = [name for name in names if environ.get(name)]
            missing = [name for name in names if not environ.get(name)]
            if not missing or set(there) <= set(alone):
                continue
            said = ", ".join(f"{name}={environ[name]}" for name in there)
            yield (
                f"{said} without {', '.join(missing)}: half of what {launcher.name} sets{where}",
                f"unset {' '.join(there)}, or start the program with its launcher, which sets all of them",
            )


def _beyond(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    places = [(one.index, one.count) for one in launchers().values()]
    places += [(one.local_index, one.local_count) for one in launchers().values()]
    for place, count in (*places, ("SLURM_PROCID", "SLURM_NTASKS")):
        if not (environ.get(place) and environ.get(count)):
            continue
        both = f"{place}={environ[place]}, {count}={environ[count]}"
        advice = f"unset {place} and {count}, or start the program with its launcher"
        try:
            index, size = int(environ[place]), int(environ[count])
        except ValueError:
            yield f"{both}: these should be numbers", advice
            continue
        if not 0 <= index < size:
            yield f"{both}: a process's number must be one of 0..{size - 1}", advice


def _two_worlds(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Worlds of several launchers (outside Slurm, which starts them) that are not the same."""
    told = [
        (one.name, environ[one.count], environ[one.index])
        for one in launchers().values()
        if one.count in environ and one.index in environ
    ]
    if len({world[1:] for world in told}) > 1:
        said = "; ".join(f"{who} says process {rank} of {size}" for who, size, rank in told)
        yield said, "unset what an earlier job has left: only the launcher that starts the program may have set any"


def _backend(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    name, keras = environ.get("UNIDIST_BACKEND"), environ.get("KERAS_BACKEND")
    if not name:
        return
    try:
        served = registry.entry(name).keras_backends
    except BackendNotAvailableError as error:
        yield f"UNIDIST_BACKEND={name}: {error}", f"set it to one of {', '.join(sorted(registry.names()))}, or unset it"
        return
    if keras and served and keras not in served:
        yield (
            f"UNIDIST_BACKEND={name}, KERAS_BACKEND={keras}: Keras must run on {' or '.join(served)}",
            "unset KERAS_BACKEND: unidist chooses it",
        )

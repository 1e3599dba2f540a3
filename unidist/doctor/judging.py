"""Judges the processes' reports: checks, with the rank, the host or the link that is to blame."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from unidist.doctor import backends
from unidist.doctor.check import Check, Question, counted
from unidist.doctor.reports import Reports
from unidist.launch.attempt import GIVEN_UP

_CLOCKS = 1.0
_MEET = (
    "look at the checks above first (hostname, interfaces, proxies); start the same command on every node, but for its "
    "--node-rank; let firewalls pass the port of --address and, between the nodes, all others: processes connect "
    "at ports that the system chooses. Machines that are only slow to import: a longer --timeout"
)
LATER = "repair what failed, then run this again"
_LOOK = "look at the last words below, and in the system's log (`dmesg`) for processes that were killed for memory"
_OPS = {
    "all_gather": "every rank's values arrive at every rank",
    "all_reduce": "the sum over all ranks is right on every rank",
}


def processes(reports: Reports) -> Check:
    """Checks that all processes of this node started."""
    request = reports.request
    asked = f"{counted(request.processes, 'process')} of {request.world_size} start on this node"
    question = Question("processes", asked)
    if reports.count != request.world_size:
        advice = "give -n, --nodes and --backend alike on every node"
        return question.failed(f"the world has {counted(reports.count, 'process')}", advice)
    silent = [process for process in reports.own if process not in reports.facts]
    if not silent:
        hosts = Counter(facts["host"] for facts in reports.facts.values())
        return question.ok(", ".join(f"{count} on {host}" for host, count in hosts.items()))
    if reports.code != GIVEN_UP:
        said = f"process {_numbers(silent)} said nothing; the launcher ended with exit code {reports.code}"
        return question.failed(said, _LOOK)
    late = f"process {_numbers(silent)} did not start in time"
    if request.nodes == 1:
        return question.failed(late, _LOOK)
    return question.failed(f"{late}: the {request.nodes} nodes have not met at {request.address}", _MEET)


def same_versions(reports: Reports) -> list[Check]:
    """Checks that all processes run the same versions: one failed check for each that differs."""
    question, facts = Question("same versions", "all processes run the same versions"), reports.facts
    missing = reports.count - len(facts)
    names = sorted({name for one in facts.values() for name in one["versions"]})
    checks = []
    for name in names:
        held = {process: one["versions"].get(name, "none") for process, one in facts.items()}
        usual = Counter(held.values()).most_common(1)[0][0]
        if other := {process: version for process, version in held.items() if version != usual}:
            said = ", ".join(f"{reports.place(process)} has {version}" for process, version in other.items())
            advice = f"install {name} {usual} there, from one list of pinned versions for all machines"
            checks.append(question.failed(f"{name}: {said}; the others have {usual}", advice))
    if checks:
        return checks
    if missing:
        return [question.not_checked(f"{missing} of {reports.count} processes did not tell theirs", LATER)]
    return [question.ok(counted(len(facts), "process"))]


def joining(reports: Reports) -> Check:
    """Checks that the processes have met."""
    question = Question("world", f"{counted(reports.count, 'process')} meet")
    outside = [process for process in reports.own if process not in reports.joined]
    if not outside:
        slowest = max(report["seconds"] for report in reports.joined.values())
        return question.ok(f"{counted(reports.size, 'rank')}, {slowest:.1f} s with the imports")
    if not reports.facts:
        return question.not_checked("no process started", LATER)
    found = told(reports, ("import", "join"), outside)
    if unknown := [k for k in range(reports.count) if k not in reports.own and k not in reports.facts]:
        found += f"; of process {_numbers(unknown)}, on other nodes, nothing is known here: are they started?"
    return question.failed(found, _MEET)


def devices(reports: Reports, cards: int) -> Check:
    """Returns which devices the ranks are. `cards`: NVIDIA cards of this machine."""
    question = Question("devices", "the ranks are accelerators where there are any")
    if not reports.joined:
        return question.not_checked(before(reports), LATER)
    names = next(iter(reports.joined.values()))["devices"]
    return backends.judge_devices(question, reports.request.backend, names, cards)


def clocks(reports: Reports) -> Check:
    """Checks that the machines' clocks agree: read at the end of a barrier."""
    question = Question("clocks", f"clocks agree to {_CLOCKS:g} s")
    if len(reports.joined) < reports.count:
        return question.not_checked("not all processes have reported their time", LATER)
    times = {process: report["clock"] for process, report in reports.joined.items()}
    first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    apart = times[last] - times[first]
    if apart > _CLOCKS:
        found = f"{reports.place(last)} is {apart:.1f} s ahead of {reports.place(first)}"
        advice = "run an NTP client on every machine (`timedatectl set-ntp true`): times in logs and files mislead"
        return question.warning(found, advice)
    return question.ok(f"{apart * 1e3:.0f} ms apart at most")


def whole_world(reports: Reports) -> Iterator[Check]:
    """The collectives over all ranks."""
    for op, asked in _OPS.items():
        question, step = Question(f"world {op}", asked), f"world {op}"
        found = {report["process"]: report for report in reports.of("world", op=op)}
        wrong = [f"{reports.place(k)}: {report['wrong']}" for k, report in found.items() if report["wrong"]]
        missing = [process for process in reports.own if process not in found]
        if wrong:
            advice = (
                "a rank's memory, card or driver makes wrong values: run that host alone, then the others without it"
            )
            yield question.failed("; ".join(wrong), advice)
        elif not missing:
            seconds = max((report.get("seconds") or 0.0 for report in found.values()), default=0.0)
            yield question.ok(f"{seconds * 1e3:.1f} ms" if seconds else "right")
        elif reports.first_stop == step:
            advice = "where all links are right: a longer --timeout, or fewer processes to find the one that disturbs"
            yield question.failed(told(reports, (step,), missing), advice)
        else:
            yield question.not_checked(before(reports), LATER)


def ending(reports: Reports, others: list[Check]) -> Iterator[Check]:
    """A world that did not end well, where no other check says why."""
    if reports.code == 0 or any(check.status == "failed" for check in others):
        return
    stops = "; ".join(f"{reports.place(stop.process)}: {stop.step}: {stop.text}" for stop in reports.stops)
    found = stops or reports.launcher or f"exit code {reports.code}"
    yield Question("end", "all processes end well").failed(found, _LOOK)


def told(reports: Reports, steps: tuple[str, ...], members: list[int]) -> str:
    """Returns what the processes said of steps that did not end.

    Errors come first, for these others may have waited.
    """
    stops = [stop for stop in reports.stops if stop.step in steps]
    said = []
    texts: dict[str, int] = {}
    for stop in sorted(stops, key=lambda stop: stop.late):
        # The same words with other numbers need no second reading.
        first = texts.setdefault(re.sub(r"\d+", "", stop.text), stop.process)
        text = stop.text if first == stop.process else f"the same as process {first}"
        said.append(f"{reports.place(stop.process)}{' (at its imports)' if stop.step == 'import' else ''}: {text}")
    if not stops and reports.launcher:
        said.append(reports.launcher)
    silent = [process for process in members if process not in {stop.process for stop in stops}]
    for process in silent:
        last = reports.last_step(process)
        begun = "it did not begin" if last is None else f"it last began {last!r}"
        said.append(f"{reports.place(process)} said nothing of it: {begun}")
    return "; ".join(said)


def before(reports: Reports) -> str:
    """Why something later was not tried."""
    if not reports.size:
        return "the world was not joined"
    if reports.first_stop:
        return f"the processes were ended in {reports.first_stop!r}"
    return f"the processes were ended before (exit code {reports.code})"


def _numbers(processes_: list[int]) -> str:
    return ", ".join(map(str, processes_))

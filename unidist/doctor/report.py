"""An examination as text, for people, and as JSON, for programs."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from unidist.doctor.check import Check, Status
from unidist.doctor.links import LARGE, SMALL, Pair
from unidist.doctor.matrix import Link
from unidist.doctor.reports import Reports
from unidist.doctor.world import Examination
from unidist.tables import table

_WIDTH = 118
_INDENT = 16
_MIB = 2**20
# Up to here a matrix is readable; it is also where the links of larger worlds are those of the ring.
_MATRIX = 11
_ORDER: tuple[Status, ...] = ("failed", "warning", "not checked", "ok")


def as_text(examination: Examination) -> str:
    """Returns what was found, section by section; what failed with what was asked, found and is to do."""
    parts = []
    for title, checks in examination.sections.items():
        wide = max(len(check.name) for check in checks)
        parts.append("\n".join([title, *(line for check in checks for line in _lines(check, wide))]))
    if examination.links:
        parts.append("\n".join(_figures(examination)))
    if examination.reports is not None and examination.failed and examination.reports.words:
        words = (f"  {line}" for line in examination.reports.words)
        parts.append("\n".join(["the last words of the launcher and its processes", *words]))
    parts.append(_sum(examination))
    return "\n\n".join(parts)


def as_json(examination: Examination) -> str:
    """The same: {"ok", "checks", "links", "processes", "last_words"}."""
    reports = examination.reports
    checks = [{"section": title, **asdict(check)} for title, found in examination.sections.items() for check in found]
    document: dict[str, Any] = {
        "ok": not examination.failed,
        "checks": checks,
        "links": [_link(link) for link in examination.links],
        "processes": [] if reports is None else [_process(reports, process) for process in reports.facts],
        "last_words": [] if reports is None or not examination.failed else list(reports.words),
    }
    return json.dumps(document, indent=2)


def _lines(check: Check, wide: int) -> Iterator[str]:
    status = check.status.upper() if check.status == "failed" else check.status
    head = f"  {status:<{_INDENT - 4}}  {check.name:<{wide}}  "
    if check.status == "ok":
        yield from _wrapped(head, check.found)
        return
    yield from _wrapped(head, f"asked: {check.asked}")
    empty = " " * len(head)
    yield from _wrapped(empty, f"found: {check.found}")
    if check.advice:
        yield from _wrapped(empty, f"to do: {check.advice}")


def _wrapped(head: str, text: str) -> list[str]:
    """Long lines go on below; words stay whole, for commands are copied."""
    after = " " * (len(head) + (7 if text[:7] in ("asked: ", "found: ", "to do: ") else 0))
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
    ) or [head.rstrip()]


def _figures(examination: Examination) -> Iterator[str]:
    reports, links = examination.reports, examination.links
    size = 0 if reports is None else reports.size
    small = f"microseconds in which two ranks swap {SMALL * 4} bytes"
    large = f"MiB/s received while two ranks swap {LARGE * 4 / _MIB:g} MiB"
    if size <= _MATRIX:
        yield f"latency: {small} (each row: as that rank measured it)"
        yield _matrix(size, links, {link.pair: {k: s * 1e6 for k, s in link.latency.items()} for link in links})
        yield f"\nbandwidth: {large}"
        yield _matrix(size, links, {link.pair: {k: b / _MIB for k, b in link.bandwidth.items()} for link in links})
        return
    yield f"links of the ring, as the slower end measured them: latency ({small}), bandwidth ({large})"
    rows = [("ranks", "latency", "bandwidth", "")]
    for link in links:
        slow = f"{max(link.latency.values()) * 1e6:.0f}" if link.latency else "-"
        rate = f"{min(link.bandwidth.values()) / _MIB:.0f}" if link.bandwidth else "-"
        rows.append((f"{link.pair[0]} - {link.pair[1]}", slow, rate, link.status))
    yield table(rows, (0, 1, 2))


def _matrix(size: int, links: tuple[Link, ...], held: dict[Pair, dict[int, float]]) -> str:
    status = {link.pair: link.status for link in links}
    rows = [("", *map(str, range(size)))]
    for row in range(size):
        cells = []
        for column in range(size):
            pair = (min(row, column), max(row, column))
            value = held.get(pair, {}).get(row)
            missing = {"failed": "FAILED", "not checked": "?"}.get(status.get(pair, ""), "-")
            cells.append(missing if value is None or missing == "FAILED" else f"{value:.0f}")
        rows.append((str(row), *cells))
    return table(rows, range(size + 1))


def _sum(examination: Examination) -> str:
    counts = Counter(check.status for check in examination.checks)
    said = ", ".join(f"{counts[status]} {status}" for status in _ORDER if counts[status])
    return f"{said}: {'not in order' if examination.failed else 'nothing failed'}"


def _link(link: Link) -> dict[str, Any]:
    return {
        "ranks": list(link.pair),
        "status": link.status,
        "found": link.found,
        "latency_us": {str(rank): seconds * 1e6 for rank, seconds in link.latency.items()},
        "bandwidth_mib_s": {str(rank): rate / _MIB for rank, rate in link.bandwidth.items()},
    }


def _process(reports: Reports, process: int) -> dict[str, Any]:
    facts, joined = reports.facts[process], reports.joined.get(process)
    ranks = [] if joined is None else joined["ranks"]
    devices = [] if joined is None else [joined["devices"][rank] for rank in ranks]
    return {key: facts[key] for key in ("process", "host", "pid", "versions")} | {"ranks": ranks, "devices": devices}

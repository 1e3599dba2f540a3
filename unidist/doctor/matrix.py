"""Links: which pairs of ranks were tried, and how fast, wrong, late or slow each is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from unidist.backends import registry
from unidist.doctor.check import Check, Question, Status
from unidist.doctor.judging import LATER, before, told
from unidist.doctor.links import Pair, pairs
from unidist.doctor.reports import Reports

_ASKED = "each of two ranks gets the other's values"
_SLOW_LATENCY, _SLOW_BANDWIDTH = 10.0, 4.0
_ADVICE = (
    "on these two hosts look at the interface that is taken (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), at the firewall "
    "between them and, with cards, at NCCL_DEBUG=INFO; try the two alone"
)
_SLOW_HERE = (
    "both are on one host: look at what else runs there (`top`), and at cores and threads above; run this once more"
)
_STUCK_HERE = (
    "both are on one host: look at its loopback and memory above, at processes that were killed (`dmesg`), and while "
    "it hangs at where they are (`py-spy dump --pid PID`)"
)
_WRONG = "a receiver's or a sender's memory, card or driver changes values: run these two hosts alone, then each alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A pair of ranks.

    Attributes:
        latency: rank -> seconds of an exchange of small messages, as that end measured it.
        bandwidth: rank -> bytes a second that came while as many went.
    """

    pair: Pair
    status: Status
    found: str
    latency: dict[int, float]
    bandwidth: dict[int, float]

    @property
    def name(self) -> str:
        return f"link {self.pair[0]}-{self.pair[1]}"


def links(reports: Reports) -> tuple[Link, ...]:
    """All links that were to be tried, in the order in which they were."""
    found: list[Link] = []
    stuck: dict[int, str] = {}
    for pair in pairs(reports.size):
        link = _link(reports, pair, stuck)
        if link.status == "failed" and len(link.latency) < 2:
            stuck.update(dict.fromkeys(pair, link.name))
        found.append(link)
    return tuple(_slow(found))


def _link(reports: Reports, pair: Pair, stuck: dict[int, str]) -> Link:
    ends, name = reports.link(pair), f"link {pair[0]}-{pair[1]}"
    latency = {rank: report["latency"] for rank, report in ends.items()}
    bandwidth = {rank: report["bandwidth"] for rank, report in ends.items()}

    def link(status: Status, what: str) -> Link:
        return Link(pair=pair, status=status, found=what, latency=latency, bandwidth=bandwidth)

    if wrong := [report["wrong"] for report in ends.values() if report["wrong"]]:
        return link("failed", "; ".join(wrong))
    here = [rank for rank in pair if reports.process_of.get(rank) in reports.own]
    missing = [rank for rank in here if rank not in ends]
    if ends and not missing:
        return link("ok", "right")
    if waited := [stuck[rank] for rank in pair if rank in stuck]:
        return link("not checked", f"its ranks waited for {waited[0]}")
    if any(stop.step == name for stop in reports.stops):
        members = [reports.process_of[rank] for rank in missing]
        if registry.entry(reports.request.backend).all_take_part:
            members = list(reports.own)
        return link("failed", told(reports, (name,), members))
    if not here:
        return link("not checked", "both its ranks are on other nodes: look at their output")
    return link("not checked", before(reports))


def _slow(found: Sequence[Link]) -> Iterator[Link]:
    """Marks a link that is much slower than the others.

    With fewer than three nobody knows which is the usual.
    """
    good = [link for link in found if link.status == "ok"]
    latency = median([max(link.latency.values()) for link in good]) if good else 0.0
    bandwidth = median([min(link.bandwidth.values()) for link in good]) if good else 0.0
    for link in found:
        if link.status != "ok" or len(good) < 3:
            yield link
        elif max(link.latency.values()) > _SLOW_LATENCY * latency:
            said = f"late: {max(link.latency.values()) * 1e6:.0f} us, the usual is {latency * 1e6:.0f} us"
            yield replace(link, status="warning", found=said)
        elif min(link.bandwidth.values()) < bandwidth / _SLOW_BANDWIDTH:
            rate = min(link.bandwidth.values())
            said = f"slow: {rate / 2**20:.0f} MiB/s, the usual is {bandwidth / 2**20:.0f} MiB/s"
            yield replace(link, status="warning", found=said)
        else:
            yield link


def check(reports: Reports, found: Sequence[Link]) -> list[Check]:
    """One check for each link that failed or is slow, and one that sums up."""
    question = Question("links", _ASKED)
    if not reports.size:
        return [question.not_checked(before(reports), LATER)]
    if reports.size == 1:
        return [question.not_checked("one rank has no link", "start two: -n 2")]
    checks = []
    blame = _culprit(reports, [link for link in found if link.status == "failed"])
    for link in found:
        if link.status in ("failed", "warning"):
            advice = f"{blame}{_advice(reports, link)}"
            checks.append(Check(link.name, _ASKED, link.status, _where(reports, link), advice))
    waiting = [link for link in found if link.status == "not checked"]
    if waiting:
        said = f"{len(waiting)} of {len(found)} links, the first {waiting[0].name}: {waiting[0].found}"
        checks.append(question.not_checked(said, LATER))
    if good := [link for link in found if link.status in ("ok", "warning")]:
        is_whole = len(found) == reports.size * (reports.size - 1) // 2
        checks.append(question.ok(f"{len(good)} of {len(found)} are right{'' if is_whole else ', those of the ring'}"))
    return checks


def _advice(reports: Reports, link: Link) -> str:
    if any(report["wrong"] for report in reports.link(link.pair).values()):
        return _WRONG
    here = _SLOW_HERE if link.status == "warning" else _STUCK_HERE
    advice = here if len(_hosts(reports, link)) == 1 else _ADVICE
    backend = reports.request.backend
    if link.status == "failed" and registry.entry(backend).all_take_part:
        return f"with {backend} all ranks take part in every link: look at each that is named; {advice}"
    return advice


def _where(reports: Reports, link: Link) -> str:
    hosts = _hosts(reports, link)
    return f"{link.found} (host{'s' if len(hosts) > 1 else ''} {' and '.join(hosts)})" if hosts else link.found


def _hosts(reports: Reports, link: Link) -> list[str]:
    ends = [reports.process_of.get(rank) for rank in link.pair]
    return list(dict.fromkeys(reports.facts[process]["host"] for process in ends if process in reports.facts))


def _culprit(reports: Reports, failed: Sequence[Link]) -> str:
    """The rank that all failed links share, where there are two of them and only one such rank."""
    shared = [rank for rank, n in Counter(rank for link in failed for rank in link.pair).items() if n == len(failed)]
    if len(failed) < 2 or len(shared) != 1:
        return ""
    process = reports.process_of.get(shared[0])
    where = "" if process is None else f", {reports.place(process)}"
    return f"all links that failed have rank {shared[0]}{where}: look there first; "

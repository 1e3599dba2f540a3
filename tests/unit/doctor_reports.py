"""What processes of a world may have sent to `unidist doctor`, made up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from unidist.doctor import world
from unidist.doctor.reports import Report, Reports

VERSIONS = {"python": "3.11.7", "keras": "3.15.1", "torch": "2.13.0"}
OPS = ("all_gather", "all_reduce")


def facts(process: int, host: str = "a", count: int = 0, **changed: str) -> Report:
    return {
        "what": "facts",
        "process": process,
        "host": host,
        "pid": 100 + process,
        "count": count,
        "versions": {**VERSIONS, **changed},
    }


def joined(process: int, count: int, clock: float = 1000.0) -> Report:
    return {
        "what": "joined",
        "process": process,
        "ranks": [process],
        "clock": clock,
        "seconds": 2.5,
        "devices": [f"cpu:{k}" for k in range(count)],
    }


def link(rank: int, pair: tuple[int, int], **changed: Any) -> Report:
    good = {"what": "link", "process": rank, "rank": rank, "wrong": None, "latency": 1e-4, "bandwidth": 2.0**30}
    return {**good, "pair": list(pair), **changed}


def op(process: int, name: str, **changed: Any) -> Report:
    return {"what": "world", "process": process, "op": name, "wrong": None, "seconds": 0.01, **changed}


def late(process: int, step: str) -> Report:
    return {"what": "late", "process": process, "step": step, "seconds": 60.0, "where": "in wait (x.py:7)"}


def begun(process: int, step: str) -> Report:
    return {"what": "begun", "process": process, "step": step}


def start(count: int) -> list[Report]:
    return [*(facts(k, count=count) for k in range(count)), *(joined(k, count) for k in range(count))]


def tried(pairs_: Iterable[tuple[int, int]]) -> list[Report]:
    return [link(rank, pair) for pair in pairs_ for rank in pair]


def whole(count: int) -> list[Report]:
    ops = [op(k, name) for name in OPS for k in range(count)]
    return [*start(count), *tried(combinations(range(count), 2)), *ops, {"what": "all", "process": 0, "reports": []}]


def reports(
    told: Sequence[Report], count: int, *, nodes: int = 1, node_rank: int = 0, code: int = 0, **how: Any
) -> Reports:
    address = "node0:29500" if nodes > 1 else None
    request = world.request("torch", count // nodes, nodes=nodes, node_rank=node_rank, address=address)
    return Reports(request=request, told=told, code=code, **how)

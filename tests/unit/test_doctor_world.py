"""What `unidist doctor -n` makes of what the processes told: worlds that were made up, most of them broken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from unidist.doctor import judging, matrix, report, world
from unidist.doctor.check import Check
from unidist.doctor.examination import Examination
from unidist.doctor.links import LARGE, MOST_PAIRS, Task, difference, pairs, pattern
from unidist.doctor.reports import Report, Reports, read
from unidist.doctor.watch import MARK
from unidist.launch.run import GIVEN_UP

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


def judged(told: Sequence[Report], count: int, **how: Any) -> dict[str, list[Check]]:
    checks, _ = world.judge(reports(told, count, **how))
    found: dict[str, list[Check]] = {}
    for check in checks:
        assert check.status == "ok" or check.advice, check
        found.setdefault(check.name, []).append(check)
    return found


def one(checks: dict[str, list[Check]], name: str) -> Check:
    assert len(checks[name]) == 1
    return checks[name][0]


def statuses(checks: dict[str, list[Check]]) -> dict[str, list[str]]:
    return {name: [check.status for check in found] for name, found in checks.items()}


def test_a_world_in_order() -> None:
    checks = judged(whole(3), 3)
    assert {status for found in statuses(checks).values() for status in found} == {"ok"}
    assert one(checks, "processes").found == "3 on a"
    assert one(checks, "links").found == "3 of 3 are right"


def test_a_process_that_says_nothing_is_named() -> None:
    checks = judged([facts(0, count=2), begun(0, "join"), late(0, "join")], 2, code=3)
    assert one(checks, "processes").status == "failed"
    assert "process 1 said nothing" in one(checks, "processes").found
    told = one(checks, "world")
    assert told.status == "failed"
    assert "process 0 (a, pid 100): nothing came for 60 s in wait (x.py:7)" in told.found
    assert "process 1 said nothing of it: it did not begin" in told.found
    assert "firewalls" in told.advice
    for name in ("clocks", "links", "world all_gather", "world all_reduce", "same versions"):
        assert statuses(checks)[name] == ["not checked"]


def test_nodes_that_do_not_meet() -> None:
    checks = judged([], 4, nodes=2, code=GIVEN_UP)
    assert one(checks, "processes").status == "failed"
    assert "the 2 nodes have not met at node0:29500" in one(checks, "processes").found
    assert one(checks, "world").status == "not checked"


def test_nodes_that_were_started_with_other_numbers() -> None:
    """This node asks for 2 of 4 processes, another one started only one, and torch makes a world of three of them."""
    told = [{**r, "process": r["process"]} for r in whole(3)] + [begun(k, "leave") for k in (1, 2)]
    checks = judged(told, 4, nodes=2, node_rank=1)
    assert [name for name, found in checks.items() if found[0].status != "ok"] == ["processes"]
    assert one(checks, "processes").found == "the world has 3 processes"
    assert "2 processes of 4 start on this node" in one(checks, "processes").asked
    assert "alike on every node" in one(checks, "processes").advice


def test_the_same_words_of_many_processes_are_told_once() -> None:
    told = [{"what": "error", "step": "join", "kind": "E", "message": f"process {k} of 3: lost"} for k in range(3)]
    errors = [{**error, "process": k} for k, error in enumerate(told)]
    check = one(judged([*(facts(k, count=3) for k in range(3)), *errors], 3, code=1), "world")
    assert check.found.count("lost") == 1
    assert check.found.endswith("process 2 (a, pid 102): the same as process 0")


def test_a_process_with_another_version_is_named() -> None:
    told = [facts(2, "b", 3, keras="3.16.0") if r == facts(2, count=3) else r for r in whole(3)]
    check = one(judged(told, 3), "same versions")
    assert check.status == "failed"
    assert check.found == "keras: process 2 (b, pid 102) has 3.16.0; the others have 3.15.1"
    assert "install keras 3.15.1" in check.advice


def test_clocks_that_differ() -> None:
    told = [joined(1, 3, clock=1042.0) if r == joined(1, 3) else r for r in whole(3)]
    check = one(judged(told, 3), "clocks")
    assert check.status == "warning"
    assert "process 1 (a, pid 101) is 42.0 s ahead of process 0" in check.found


def test_ranks_on_the_cpu_of_a_machine_with_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(judged(whole(3), 3), "devices").found == "3 cpu"
    monkeypatch.setattr(world, "count_cards", lambda: 8)
    check = one(judged(whole(3), 3), "devices")
    assert check.status == "warning"
    assert check.found == "3 cpu, but this machine has 8 NVIDIA cards"
    assert "CUDA_VISIBLE_DEVICES" in check.advice
    seen = reports(whole(3), 3)
    seen.joined[0]["devices"] = ["gpu:0", "gpu:1", "gpu:2"]
    assert judging.devices(seen, 8).status == "ok"


def test_a_wrong_value_on_one_link() -> None:
    wrong = "rank 1 got from rank 0: 16 of 16 values are wrong"
    told = [link(1, (0, 1), wrong=wrong) if r == link(1, (0, 1)) else r for r in whole(3)]
    checks = judged(told, 3)
    assert one(checks, "link 0-1").status == "failed"
    assert wrong in one(checks, "link 0-1").found
    assert "look there first" not in one(checks, "link 0-1").advice
    assert one(checks, "links").found == "2 of 3 are right"


def test_a_rank_that_all_failed_links_share_is_named() -> None:
    bad = [(0, 1), (1, 2)]
    told = [
        {**r, "wrong": "rank 1 got wrong values"} if r["what"] == "link" and tuple(r["pair"]) in bad else r
        for r in whole(4)
    ]
    checks = judged(told, 4)
    for name in ("link 0-1", "link 1-2"):
        assert "all links that failed have rank 1, process 1 (a, pid 101): look there first" in one(checks, name).advice


def test_a_link_that_hangs_is_told_from_those_that_wait_for_it() -> None:
    """Rank 3 works; 0 and 1 hang in their link, 2 waits for 0; the hanging link is the cause."""
    told = [
        *start(4),
        late(2, "world all_gather"),
        *(begun(k, "link 0-1") for k in (0, 1)),
        *(begun(k, "link 0-2") for k in (2, 3)),
        begun(3, "link 0-3"),
        *(late(0, "link 0-1"), late(2, "link 0-2"), late(3, "link 0-3")),
    ]
    checks = judged(told, 4, code=3)
    assert [name for name, found in checks.items() if found[0].status == "failed"] == ["link 0-1"]
    told_of = one(checks, "link 0-1")
    assert "process 0 (a, pid 100): nothing came for 60 s in wait (x.py:7)" in told_of.found
    assert "process 1 (a, pid 101) said nothing of it: it last began 'link 0-1'" in told_of.found
    assert "py-spy dump" in told_of.advice
    assert one(checks, "links").status == "not checked"
    assert "5 of 6 links, the first link 0-2: its ranks waited for link 0-1" in one(checks, "links").found
    for op_ in OPS:
        assert one(checks, f"world {op_}").status == "not checked"
        assert "ended in 'link 0-1'" in one(checks, f"world {op_}").found


def test_a_collective_of_the_world_that_hangs() -> None:
    told = [*start(3), *tried(pairs(3)), late(0, "world all_gather"), late(2, "world all_gather")]
    checks = judged(told, 3, code=3)
    assert [name for name, found in checks.items() if found[0].status == "failed"] == ["world all_gather"]
    assert "process 1 (a, pid 101) said nothing of it" in one(checks, "world all_gather").found
    assert one(checks, "world all_reduce").status == "not checked"


def test_a_link_between_two_hosts_that_hangs() -> None:
    told = [facts(0, "a", 2), facts(1, "b", 2), joined(0, 2), joined(1, 2), late(0, "link 0-1"), late(1, "link 0-1")]
    check = one(judged(told, 2, code=3), "link 0-1")
    assert "(hosts a and b)" in check.found
    assert "GLOO_SOCKET_IFNAME" in check.advice


def test_where_all_take_part_in_a_link_those_that_went_on_are_named() -> None:
    told = [*start(3), *tried([(0, 1)]), begun(1, "link 1-2"), late(0, "link 0-2"), late(2, "link 0-2")]
    request = world.request("horovod", 3)
    checks, _ = world.judge(Reports(request=request, told=told, code=3))
    (check,) = (check for check in checks if check.name == "link 0-2")
    assert "process 1 (a, pid 101) said nothing of it: it last began 'link 1-2'" in check.found
    assert "with Horovod all ranks take part in every link" in check.advice


def test_what_a_process_says_after_it_was_late_comes_of_the_others() -> None:
    error = {"what": "error", "process": 1, "step": "link 0-1", "kind": "RuntimeError", "message": "closed by peer"}
    check = one(judged([*start(2), late(0, "link 0-1"), late(1, "link 0-1"), error], 2, code=3), "link 0-1")
    assert "closed by peer" not in check.found


def test_two_links_that_hang_apart_are_both_told() -> None:
    told = [*start(4), late(0, "link 0-1"), late(1, "link 0-1"), late(2, "link 2-3"), late(3, "link 2-3")]
    checks = judged(told, 4, code=3)
    assert one(checks, "link 0-1").status == one(checks, "link 2-3").status == "failed"


def test_an_error_on_a_link() -> None:
    error = {"what": "error", "process": 1, "step": "link 0-1", "kind": "RuntimeError", "message": "no route to host"}
    checks = judged([*start(2), error], 2, code=1)
    assert "process 1 (a, pid 101): RuntimeError: no route to host" in one(checks, "link 0-1").found


def test_a_link_that_is_much_slower_than_the_others_is_told() -> None:
    told = [{**r, "bandwidth": 2.0**26} if r["what"] == "link" and r["pair"] == [1, 2] else r for r in whole(3)]
    checks = judged(told, 3)
    assert one(checks, "link 1-2").status == "warning"
    assert "slow: 64 MiB/s, the usual is 1024 MiB/s" in one(checks, "link 1-2").found
    told = [{**r, "latency": 2e-3} if r["what"] == "link" and r["pair"] == [0, 2] else r for r in whole(3)]
    assert "late: 2000 us, the usual is 100 us" in one(judged(told, 3), "link 0-2").found


def test_a_wrong_sum_names_who_sees_it() -> None:
    wrong = op(1, "all_reduce", wrong="on rank 1: 3 of 16 values are wrong")
    told = [wrong if r == op(1, "all_reduce") else r for r in whole(2)]
    check = one(judged(told, 2), "world all_reduce")
    assert check.status == "failed"
    assert "process 1 (a, pid 101): on rank 1: 3 of 16" in check.found


def test_a_process_that_is_killed_without_a_word() -> None:
    told = [*start(2), begun(0, "link 0-1")]
    checks = judged(told, 2, code=137, launcher="rank 1 of 2 failed first, with signal SIGKILL")
    assert one(checks, "end").status == "failed"
    assert "rank 1 of 2 failed first, with signal SIGKILL" in one(checks, "end").found
    assert "last words" in one(checks, "end").advice
    checks = judged([facts(0, count=2), facts(1, count=2)], 2, code=137, launcher="rank 1 of 2 failed first")
    assert one(checks, "world").found.startswith("rank 1 of 2 failed first; process 0")


def test_processes_of_other_nodes_that_nothing_is_known_of_are_named() -> None:
    told = [facts(0, count=4), facts(1, count=4), late(0, "join"), late(1, "join")]
    check = one(judged(told, 4, nodes=2, code=3), "world")
    assert "of process 2, 3, on other nodes, nothing is known here" in check.found


def test_a_node_tells_of_the_links_that_it_sees() -> None:
    """Node 1 of two, whose processes never learnt what node 0 found: links among the others are not its to tell."""
    told = [
        facts(2, count=4),
        facts(3, count=4),
        joined(2, 4),
        joined(3, 4),
        *[link(2, (0, 2)), link(2, (2, 3)), link(3, (2, 3))],
    ]
    told += [link(2, (1, 2)), link(3, (0, 3)), link(3, (1, 3))]
    seen = reports(told, 4, nodes=2, node_rank=1)
    found = {each.pair: (each.status, each.found) for each in matrix.links(seen)}
    assert found.pop((0, 1)) == ("not checked", "both its ranks are on other nodes, whose own output tells")
    assert {status for status, _ in found.values()} == {"ok"}


# what is sent


def test_all_pairs_of_few_ranks_and_the_ring_of_many() -> None:
    assert pairs(3) == ((0, 1), (0, 2), (1, 2))
    assert len(pairs(11)) == 55 <= MOST_PAIRS
    assert pairs(12) == (*((k, k + 1) for k in range(11)), (11, 0))
    assert pairs(1) == pairs(0) == ()


def test_patterns_tell_ranks_apart_and_their_sums_are_exact() -> None:
    first = [pattern(k, 64) for k in range(64)]
    assert all(difference(a, b) for a, b in combinations(first, 2))
    total = sum(pattern(k, 4096).astype(np.float64) for k in range(1000))
    assert difference(np.sum([pattern(k, 4096) for k in range(1000)], axis=0, dtype=np.float32), total) is None


def test_how_values_differ_is_told() -> None:
    good = pattern(0, 8)
    bad = good.copy()
    bad[5] = -1
    assert difference(good, good) is None
    assert difference(bad, good) == "1 of 8 values are wrong, the first at 5: -1 instead of 36"
    assert difference(good[:4], good) == "shape (4,) instead of (8,)"
    nan = good.copy()
    nan[0] = np.nan
    assert "1 of 8 values are wrong" in str(difference(nan, good))


def test_a_task_comes_through() -> None:
    task = Task(backend="jax", processes=2, timeout=7.5, importing=1.0, joining=2.0)
    assert Task.read(task.write()) == task


# the lines between processes and command


def test_reports_are_found_among_other_output() -> None:
    inner = [facts(0), facts(1)]
    lines = [
        "[0] [Gloo] Rank 0 is connected",
        f"[0] {MARK}{json.dumps(facts(0))}",
        f"[1] half a line {MARK}{json.dumps(begun(1, 'join'))}",
        f"[0] {MARK}{json.dumps({'what': 'all', 'process': 0, 'reports': inner})}",
    ]
    found = read("\n".join(lines))
    assert [r["what"] for r in found] == ["facts", "begun", "all", "facts"]
    assert found[-1] == facts(1)


# the text


def examined(told: Sequence[Report], count: int, **how: Any) -> Examination:
    seen = reports(told, count, **how)
    checks, links = world.judge(seen)
    return Examination(sections={"world": checks}, links=links, reports=seen)


def test_the_matrices() -> None:
    told = [{**r, "latency": (r["rank"] + 1) * 1e-4} if r["what"] == "link" else r for r in whole(3)]
    lines = report.as_text(examined(told, 3)).splitlines()
    top = next(k for k, line in enumerate(lines) if line.startswith("latency"))
    assert [line.split() for line in lines[top + 1 : top + 5]] == [
        ["0", "1", "2"],
        ["0", "-", "100", "100"],
        ["1", "200", "-", "200"],
        ["2", "300", "300", "-"],
    ]
    assert "MiB/s" in lines[top + 6]
    assert lines[top + 8].split() == ["0", "-", "1024", "1024"]
    assert f"{LARGE * 4 // 2**20} MiB" in lines[top + 6]


def test_failed_links_stand_in_the_matrix_and_last_words_below() -> None:
    told = [*start(3), late(0, "link 0-1"), late(1, "link 0-1")]
    found = examined(told, 3, code=3, words=["unidist: rank 0 of 3 failed first"])
    text = report.as_text(found)
    assert text.count("FAILED") == 1 + 4  # the check, and both ends in two matrices
    assert "unidist: rank 0 of 3 failed first" in text
    document = json.loads(report.as_json(found))
    assert document["ok"] is False
    assert [(each["ranks"], each["status"]) for each in document["links"]] == [
        ([0, 1], "failed"),
        ([0, 2], "not checked"),
        ([1, 2], "not checked"),
    ]
    assert document["processes"][1] == {
        **{"process": 1, "host": "a", "pid": 101, "versions": VERSIONS},
        **{"ranks": [1], "devices": ["cpu:1"]},
    }


def test_many_ranks_are_listed() -> None:
    count = 12
    told = [*start(count), *tried(pairs(count)), *(op(k, name) for name in OPS for k in range(count))]
    text = report.as_text(examined(told, count))
    assert "12 of 12 are right, those of the ring" in text
    assert len([line for line in text.splitlines() if line.rstrip().endswith("ok") and " - " in line]) == count


@pytest.mark.parametrize("code", [0, 1])
def test_a_world_that_ends_badly_is_not_in_order(code: int) -> None:
    assert examined(whole(2), 2, code=code).failed is (code != 0)


def test_what_failed_is_told_first_among_what_is_said_of_a_step() -> None:
    error = {"what": "error", "process": 1, "step": "join", "kind": "OSError", "message": "no such host"}
    seen = reports([facts(0, count=2), facts(1, count=2), late(0, "join"), error], 2)
    assert judging.told(seen, ("import", "join"), [0, 1]).startswith(
        "process 1 (a, pid 101): OSError: no such host; process 0"
    )

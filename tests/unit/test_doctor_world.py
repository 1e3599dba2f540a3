"""What `unidist doctor -n` makes of what the processes sent: worlds that were made up, most of them broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.doctor_reports import OPS, begun, facts, joined, late, link, op, reports, start, tried, whole
from unidist.doctor import judging, matrix, world
from unidist.doctor.check import Check
from unidist.doctor.links import pairs
from unidist.doctor.reports import Report, Reports
from unidist.launch.attempt import GIVEN_UP


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
    monkeypatch.setattr("unidist.doctor.backends.count_cards", lambda: 8)
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


@pytest.mark.parametrize("silent", [0, 1])
def test_one_end_does_not_tell_for_the_other(silent: int) -> None:
    told = [*start(2), link(1 - silent, (0, 1))]
    waiting = one(judged(told, 2, code=3), "links")
    assert (waiting.status, waiting.found[:23]) == ("not checked", "1 of 1 links, the first")
    check = one(judged([*told, late(silent, "link 0-1")], 2, code=3), "link 0-1")
    assert check.status == "failed"
    assert f"process {silent} (a, pid {100 + silent}): nothing came for 60 s" in check.found


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
    assert "with horovod all ranks take part in every link" in check.advice


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


@pytest.mark.parametrize("end", [0, 2])
def test_a_link_that_one_end_alone_sees_as_slow_is_told(end: int) -> None:
    told = [{**r, "bandwidth": 2.0**26} if r == link(end, (0, 2)) else r for r in whole(3)]
    assert one(judged(told, 3), "link 0-2").status == "warning"
    told = [{**r, "latency": 2e-3} if r == link(end, (0, 2)) else r for r in whole(3)]
    assert one(judged(told, 3), "link 0-2").status == "warning"


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
    assert found.pop((0, 1)) == ("not checked", "both its ranks are on other nodes: look at their output")
    assert {status for status, _ in found.values()} == {"ok"}

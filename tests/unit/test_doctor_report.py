"""What `unidist doctor -n` sends, how processes tell what they found, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from tests.unit.doctor_reports import OPS, VERSIONS, begun, facts, late, op, reports, start, tried, whole
from unidist.doctor import judging, report, world
from unidist.doctor.links import LARGE, MARK, MOST_PAIRS, Task, difference, pairs, pattern
from unidist.doctor.reports import Report, read
from unidist.doctor.world import Examination

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

"""What each process of `unidist doctor -n` does: values over links, on the simulator, and the watch over each step."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from unidist import array
from unidist.array import DistributedArray
from unidist.backends import registry
from unidist.doctor import worker, world
from unidist.doctor.links import MARK, Task

TASK = Task(backend="sim", processes=1, timeout=5.0, importing=5.0, joining=5.0, small=1, large=1)


@pytest.fixture(scope="module")
def three() -> Iterator[worker._World]:
    """Three ranks in one process."""
    with registry.isolated():
        yield worker._World(registry.use("sim", devices=3), TASK)


def test_both_ends_of_a_link_tell(three: worker._World) -> None:
    reports = three.link((0, 2))
    assert [(report["rank"], report["pair"], report["wrong"]) for report in reports] == [
        (0, [0, 2], None),
        (2, [0, 2], None),
    ]
    assert all(report["latency"] > 0 and report["bandwidth"] > 0 for report in reports)


def test_values_that_do_not_cross_a_link_are_wrong_at_both_ends(
    three: worker._World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stay(x: DistributedArray, *_: object) -> DistributedArray:
        return x

    monkeypatch.setattr(array, "permute", stay)
    said = [report["wrong"] for report in three.link((0, 2))]
    assert [text.partition(":")[0] for text in said] == ["rank 0 got from rank 2", "rank 2 got from rank 0"]
    assert all("16 of 16 values are wrong, the first at 0" in text for text in said)


def test_the_whole_world_is_right_and_told_once(three: worker._World) -> None:
    for check in three.checks.values():
        (report,) = check()
        assert report["wrong"] is None
    told = [{"what": "facts", "process": 0, "host": "grüße"}]
    assert three.exchange(told) == told


PROGRAM = """
import time
from unidist.doctor.worker import Watch
watch = Watch(4, 0.1)
with watch.step("join", 0.2):
    pass
time.sleep(0.4)
try:
    with watch.step("link 0-1", 0.2):
        raise ValueError("closed")
except ValueError:
    time.sleep(0.4)
with watch.step("link 0-2", 0.3):
    time.sleep(20)
"""


def test_a_step_that_takes_too_long_ends_the_process_and_none_before_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    told = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines()]
    steps = [(report["what"], report["step"]) for report in told]
    assert steps == [
        ("begun", "join"),
        ("begun", "link 0-1"),
        ("error", "link 0-1"),
        ("begun", "link 0-2"),
        ("late", "link 0-2"),
    ]
    assert (told[2]["kind"], told[2]["message"]) == ("ValueError", "closed")
    assert (told[4]["process"], told[4]["seconds"], told[4]["where"]) == (4, 0.3, "in <module> (<string>:14)")


def test_a_silent_world_is_given_up_sooner_where_it_never_spoke(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    task = Task.read(world.request("torch", 2).command[-1])
    assert (task.importing, task.joining, task.linger) == (180.0, 60.0, 3.0)
    heard = world._Heard(task)
    now[0] = 74.0
    assert heard.silent_for_too_long() is None
    now[0] = 76.0
    assert heard.silent_for_too_long() == "no process said anything for 75 s"
    heard.write("[0] word\n")
    now[0] = 76.0 + 197.0
    assert heard.silent_for_too_long() is None
    now[0] = 76.0 + 199.0
    assert heard.silent_for_too_long() == "no process said anything for 198 s"

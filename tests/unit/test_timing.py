"""`ci/timing.py`: two workers compute, and a third takes the files that mostly wait, as long as there are any."""

from __future__ import annotations

import pytest

from ci import timing

TOOK = {
    "waits.py": {"wall": 10.0, "cpu": 1.0},
    "waits too.py": {"wall": 20.0, "cpu": 8.0},
    "computes.py": {"wall": 60.0, "cpu": 50.0},
    "computes too.py": {"wall": 10.0, "cpu": 9.0},
}


class Gateway:
    def __init__(self, number: int) -> None:
        self.id = f"gw{number}"


class Node:
    """A worker of xdist: what it was sent."""

    shutting_down = False

    def __init__(self, number: int) -> None:
        self.gateway, self.sent = Gateway(number), list[str]()

    def send_runtest_some(self, places: list[int]) -> None:
        self.sent += places

    def shutdown(self) -> None:
        self.shutting_down = True


def test_the_third_worker_takes_what_waits_until_there_is_no_more(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(timing, "known", lambda: TOOK)
    monkeypatch.setattr(timing, "waiting", timing.waiting.__wrapped__)
    files = ("computes.py", "new.py", "waits too.py", "computes too.py", "newer.py", "waits.py", "newest.py")
    tests = [f"{file}::test" for file in files]
    nodes = [Node(number) for number in range(3)]
    monkeypatch.setattr(pytestconfig.option, "tx", ["3*popen"])
    scheduling = timing.Scheduling(pytestconfig)
    for node in nodes:
        scheduling.add_node(node)  # type: ignore[arg-type]
    for node in nodes:
        scheduling.add_node_collection(node, tests)  # type: ignore[arg-type]
    scheduling.schedule()
    assert [[files[place] for place in node.sent] for node in nodes] == [
        ["computes.py", "computes too.py"],
        ["new.py", "newer.py"],
        ["waits too.py", "waits.py"],
    ]
    scheduling._reschedule(nodes[2])  # type: ignore[arg-type]
    assert nodes[2].shutting_down
    assert list(scheduling.workqueue) == ["newest.py"]

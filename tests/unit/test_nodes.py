"""The launchers of several nodes and their keeper, over the loopback: who belongs together, and what ends all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from unidist.backends import door
from unidist.backends.lines import Line
from unidist.launch import keeper, nodes, together
from unidist.launch.keeper import FAILED, Keeper, Terms
from unidist.launch.nodes import Finish, Go, Member, Next, Report
from unidist.launch.request import LaunchError, Request, free_port

# Seconds: what a busy machine may take for what comes at once, and what a test waits for.
PATIENT, SOON = 8.0, 2.0
TERMS = Terms(nodes=2, processes=2, backend="torch", timeout=PATIENT, restarts=2)
WELL = Report(code=0, what="", has_failed=False, is_consequence=False, leaves=False, progress=9)
KILLED = Report(code=137, what="rank 3 was killed", has_failed=True, is_consequence=False, leaves=False, progress=5)
LOST = Report(
    code=1, what="rank 0 lost another", has_failed=True, is_consequence=True, leaves=False, progress=5, late=(1,)
)
Script = Callable[[Member], Any]


@dataclass
class Run:
    """A keeper, and what it said."""

    place: tuple[str, int]
    timeout: float
    keeper: Any = None
    said: list[str] = field(default_factory=list)

    def member(self, number: int, timeout: float | None = None, **words: Any) -> Member:
        known = {"node": number, "nodes": 2, "processes": 2, "backend": "torch"}
        return Member(self.place, {**known, **words}, timeout or self.timeout)

    def play(self, *scripts: Script, nodes: int = 2) -> list[Any]:
        """Plays each node's part in a thread of its own. Gives what each returned."""
        results: list[Any] = [None] * len(scripts)
        members = [self.member(node, nodes=nodes) for node in range(len(scripts))]

        def part(node: int) -> None:
            results[node] = scripts[node](members[node])

        threads = [threading.Thread(target=part, args=(node,)) for node in range(len(scripts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENT)
        for member in members:
            member.close()
        return results


@contextmanager
def kept(terms: Terms = TERMS) -> Iterator[Run]:
    server = socket.create_server(("127.0.0.1", 0))
    run = Run(server.getsockname(), terms.timeout)
    ports = iter(range(4000, 5000))
    run.keeper = Keeper(server, terms, lambda: next(ports), run.said.append)
    try:
        yield run
    finally:
        run.keeper.close(0.5)


def go(attempt: int, port: int, node: int = 0, nodes: int = 2) -> Go:
    return Go(attempt, port, nodes, node)


def one_attempt(report: Report) -> Script:
    return lambda member: [member.start(), member.ended(report)]


def stopped(member: Member) -> str:
    deadline = time.monotonic() + PATIENT
    while member.stop is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return member.stop


def test_all_begin_with_one_port_and_end_together() -> None:
    with kept() as run:
        assert run.play(one_attempt(WELL), one_attempt(WELL)) == [[go(0, 4000, node), Finish(0, "")] for node in (0, 1)]


def test_nobody_begins_before_all_are_there() -> None:
    has_come = threading.Event()

    def late(member: Member) -> bool:
        time.sleep(0.3)
        has_come.set()
        member.start()
        return has_come.is_set()

    def early(member: Member) -> bool:
        member.start()
        return has_come.is_set()

    with kept(Terms(2, 2, "torch", PATIENT, restarts=0, fewest=1)) as run:
        assert run.play(early, late) == [True, True]


def test_a_failure_stops_all_and_a_cause_goes_before_its_consequence() -> None:
    def fails(member: Member) -> list[Any]:
        member.start()
        why = stopped(member)
        first = member.ended(KILLED)
        return [why, first, member.again(), member.ended(WELL)]

    def loses(member: Member) -> list[Any]:
        member.start()
        member.failed(LOST.what)
        first = member.ended(LOST)
        return [first, member.again(), member.stop, member.ended(WELL)]

    with kept() as run:
        here, there = run.play(loses, fails)
    again = Next(1, 0.0, "rank 3 was killed")
    assert there == [LOST.what, again, go(1, 4001, 1), Finish(0, "")]
    assert here == [again, go(1, 4001), None, Finish(0, "")]


def test_where_all_have_lost_another_who_did_not_come_is_named() -> None:
    with kept(Terms(2, 2, "torch", PATIENT, restarts=0)) as run:
        ends = run.play(one_attempt(LOST), one_attempt(Report(**{**vars_of(LOST), "late": ()})))
    assert [end[1] for end in ends] == [Finish(1, "rank 1 did not come: rank 0 lost another")] * 2


@pytest.mark.parametrize("there", [WELL, LOST])
def test_where_all_have_lost_another_who_ended_too_soon_is_named(there: Report) -> None:
    with kept(Terms(2, 2, "torch", PATIENT, restarts=0)) as run:
        ends = run.play(one_attempt(LOST), one_attempt(Report(**{**vars_of(there), "done": (2, 3)})))
    said = "ranks 2, 3 ended with exit code 0 before the others were done: rank 0 lost another"
    assert [end[1] for end in ends] == [Finish(1, said)] * 2


@pytest.mark.parametrize("is_silent", [False, True])
def test_who_gives_no_sign_of_life_may_wait_for_one_that_ended_too_soon(is_silent: bool) -> None:
    silent = Report(124, "rank 0 gave no sign of life", True, False, False, 5, is_silent=is_silent)
    with kept(Terms(2, 2, "torch", PATIENT, restarts=0)) as run:
        ends = run.play(one_attempt(silent), one_attempt(Report(**{**vars_of(WELL), "done": (2,)})))
    said = f"rank 2 ended with exit code 0 before the others were done: {silent.what}" if is_silent else silent.what
    assert [end[1] for end in ends] == [Finish(124, said)] * 2


def test_the_others_learn_of_those_that_ended_without_joining() -> None:
    left = Report(**{**vars_of(WELL), "done": (2, 3), "absent": (3,)})

    def waits(member: Member) -> list[Any]:
        member.start()
        deadline = time.monotonic() + PATIENT
        while not member.absent:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = member.absent
        late = time.monotonic() - found[3]
        member.ended(KILLED)
        member.again()
        return [sorted(found), late < PATIENT, member.absent, member.ended(WELL)]

    def goes(member: Member) -> list[Any]:
        return [*one_attempt(left)(member), member.again(), member.ended(WELL)]

    with kept() as run:
        here, _ = run.play(waits, goes)
    assert here == [[3], True, {}, Finish(0, "")]


def vars_of(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__slots__}


def test_the_run_ends_with_the_first_error_when_no_restart_is_left() -> None:
    def goes_on(first: Report, second: Report) -> Script:
        return lambda member: [member.start(), member.ended(first), member.again(), member.ended(second)]

    other = Report(**{**vars_of(KILLED), "what": "rank 2 raised", "code": 1})
    with kept(Terms(2, 2, "torch", PATIENT, restarts=1)) as run:
        ends = run.play(goes_on(WELL, WELL), goes_on(KILLED, other))
    last = "the last failure was: rank 2 raised; "
    finish = Finish(137, f"{last}no restart is left of 1; the first failure was: rank 3 was killed")
    assert [end[-1] for end in ends] == [finish] * 2


def test_a_launcher_that_is_asked_to_end_ends_all() -> None:
    asked = Report(143, "SIGTERM: all processes were ended", False, False, True, 5)

    def leaves(member: Member) -> Any:
        member.start()
        member.failed(asked.what)
        return member.ended(asked)

    def follows(member: Member) -> Any:
        member.start()
        return [stopped(member), member.ended(LOST)]

    with kept() as run:
        here, there = run.play(follows, leaves)
    assert there == Finish(143, asked.what)
    assert here == [asked.what, there]


def test_a_node_that_goes_is_named_and_one_that_comes_again_is_taken() -> None:
    gone = threading.Event()

    def stays(member: Member) -> list[Any]:
        member.start()
        why = stopped(member)
        gone.set()
        return [why, member.ended(LOST), member.again(), member.ended(WELL)]

    def goes(member: Member) -> list[Any]:
        member.start()
        member.close()
        assert gone.wait(PATIENT)
        return [member.start(), member.ended(WELL)]

    with kept() as run:
        here, there = run.play(stays, goes)
    assert here == ["node 1 (ranks 2, 3) has gone", Next(1, 0.0, "node 1 (ranks 2, 3) has gone"), go(1, 4001), there[1]]
    assert there == [go(1, 4001, 1), Finish(0, "")]


def test_one_that_comes_again_during_an_attempt_waits_for_the_next() -> None:
    """It must not be waited for as one of the attempt that it does not take part in."""
    is_back = threading.Event()

    def stays(member: Member) -> Any:
        member.start()
        stopped(member)
        assert is_back.wait(PATIENT)
        time.sleep(0.3)
        return [member.ended(LOST), member.again(), member.ended(WELL)]

    def goes(member: Member) -> Any:
        member.start()
        member.close()
        threading.Timer(0.3, is_back.set).start()
        return [member.start(), member.ended(WELL)]

    with kept() as run:
        here, there = run.play(stays, goes)
    assert here[1:] == [go(1, 4001), Finish(0, "")]
    assert there == [go(1, 4001, 1), Finish(0, "")]


def test_a_node_without_a_word_is_lost_on_both_sides() -> None:
    """As where a cable is cut: nothing is closed."""
    with kept(replace(TERMS, timeout=SOON)) as run:
        silent = Line(socket.create_connection(run.place))
        door.knock(silent, node=1, nodes=2, processes=2, backend="torch")
        member = run.member(0)
        assert member.start() == go(0, 4000)
        begun = time.monotonic()
        assert stopped(member).startswith("node 1 (ranks 2, 3) gave no answer for 2 s")
        assert 1.5 < time.monotonic() - begun < PATIENT
        silent.close()
        member.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_says_go_and_no_more, args=(server,), daemon=True).start()
        member = Member(server.getsockname(), {}, 1.0)
        assert member.start() == go(0, 4000)
        assert stopped(member).endswith("gave no answer for 1 s")
        member.close()


def _says_go_and_no_more(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(b'{"go": {"attempt": 0, "port": 4000, "nodes": 2, "node": 0}}\n')
        while connection.recv(4096):
            pass


def test_nodes_that_never_come_are_named() -> None:
    with kept(replace(TERMS, timeout=SOON)) as run:
        assert run.play(lambda member: member.start()) == [
            Finish(FAILED, "node 1 (ranks 2, 3) did not come within 2 s"),
        ]


LEFT_FOR_MORE = Report(code=75, what="left", has_failed=True, is_consequence=False, leaves=False, progress=7)


def asked(member: Member) -> bool:
    deadline = time.monotonic() + PATIENT
    while not member.leave:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return member.leave


def test_a_run_goes_on_with_fewer_nodes_and_takes_back_one_that_comes() -> None:
    """Ranks count on over the node that is missing. Who comes begins the next attempt, and that is no restart."""
    is_small = threading.Event()

    def stays(member: Member) -> list[Any]:
        first = [member.start(), stopped(member), member.ended(LOST)]
        second = member.again()
        is_small.set()
        return [*first, second, asked(member), member.ended(LEFT_FOR_MORE), member.again(), member.ended(WELL)]

    def goes(member: Member) -> list[Any]:
        member.start()
        member.close()
        assert is_small.wait(PATIENT)
        return [member.start(), member.ended(WELL)]

    with kept(Terms(3, 2, "torch", SOON, restarts=1, fewest=2)) as run:
        first, gone, last = run.play(stays, goes, stays, nodes=3)
        assert run.said == ["node 1 did not come: the run goes on with 2 of 3 nodes"]
    lost = "node 1 (ranks 2, 3) has gone"
    grown = Next(0, 0.0, "a node has come: the trainings have saved")
    for place, (own, after) in enumerate(((first, 0), (last, 2))):
        assert own == [
            go(0, 4000, after, 3),
            lost,
            Next(1, 0.0, lost),
            go(1, 4001, place, 2),
            True,
            grown,
            go(2, 4002, after, 3),
            Finish(0, ""),
        ]
    assert gone == [go(2, 4002, 1, 3), Finish(0, "")]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"nodes": 3}, "it was started with nodes 3, and node 0 with 2"),
        ({"processes": 1}, "it was started with processes 1, and node 0 with 2"),
        ({"backend": "jax"}, "it was started with backend 'jax', and node 0 with 'torch'"),
        ({"node": 2}, "its node rank 2 is not one of 0 to 1"),
        ({"node": "1"}, "its node rank '1' is not one of 0 to 1"),
        ({"node": True}, "its node rank True is not one of 0 to 1"),
    ],
)
def test_who_does_not_belong_here_is_sent_away(words: dict[str, Any], why: str) -> None:
    with kept() as run:
        with pytest.raises(LaunchError, match="does not take this node") as caught:
            run.member(1, **words).start()
        assert why in str(caught.value)
        assert run.said == [f"a launcher at 127.0.0.1 was sent away: {why}"]
        assert run.play(one_attempt(WELL), one_attempt(WELL)) == [[go(0, 4000, node), Finish(0, "")] for node in (0, 1)]


def test_a_second_node_of_one_number_waits_and_does_not_take_its_place() -> None:
    with kept() as run:
        first, second = run.member(1), run.member(1, timeout=1.0)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(first.start()))
        thread.start()
        while 1 not in run.keeper._nodes:
            time.sleep(0.01)
        refused = second.start()
        assert isinstance(refused, Finish)
        assert "node 1 (ranks 2, 3) is here already" in refused.what
        zero = run.member(0)
        assert zero.start() == go(0, 4000)
        thread.join(PATIENT)
        assert found == [go(0, 4000, 1)]
        for member in (first, second, zero):
            member.close()


def test_a_stranger_without_the_token_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(door.TOKEN, "secret")
    with kept() as run:
        with socket.create_connection(run.place) as stranger:
            stranger.sendall(b'{"node": 1, "nodes": 2, "processes": 2, "backend": "torch", "token": "guessed"}\n')
            stranger.settimeout(5)
            assert stranger.recv(100) == b""
        assert run.play(one_attempt(WELL), one_attempt(WELL)) == [[go(0, 4000, node), Finish(0, "")] for node in (0, 1)]


def test_an_address_that_cannot_be_listened_at_is_said() -> None:
    def request(address: str) -> Request:
        return Request(backend="torch", command=(__file__,), nodes=2, address=address, timeout=1.0)

    def listen(address: str) -> None:
        together.go(request(address), None, None, (), lambda: None)  # type: ignore[arg-type]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use"):
            listen(f"127.0.0.1:{port}")
    with pytest.raises(LaunchError, match=r"'nowhere\.invalid', leads nowhere"):
        listen(f"nowhere.invalid:{free_port()}")


def test_a_host_that_leads_nowhere_is_said_by_the_others_too() -> None:
    finish = Member(("nowhere.invalid", 29500), {}, 0.5).start()
    assert isinstance(finish, Finish)
    assert finish.code == FAILED
    assert finish.what.startswith("node 0 was not found at nowhere.invalid:29500 within 0.5 s")


def silent(run: Run, number: int) -> Line:
    """A node that came, and says nothing any more: its cable is cut."""
    line = Line(socket.create_connection(run.place, timeout=5))
    door.knock(line, node=number, nodes=2, processes=2, backend="torch")
    return line


def test_where_something_failed_a_node_that_says_nothing_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "SILENCE", 1.0)
    begun = time.monotonic()
    with kept(Terms(2, 2, "torch", timeout=60.0, restarts=0)) as run:
        member, other = run.member(0, timeout=60.0), silent(run, 1)
        assert isinstance(member.start(), Go)
        member.failed(KILLED.what)
        assert member.ended(KILLED) == Finish(137, KILLED.what)
        member.close()
        other.close()
    assert 0.9 < time.monotonic() - begun < 20


def test_a_launcher_that_failed_does_not_wait_long_for_a_keeper_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "SILENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        member = Member(server.getsockname(), {"node": 1}, 60.0)
        answers = threading.Thread(target=_says_go_and_no_more, args=(server,))
        answers.start()
        assert isinstance(member.start(), Go)
        begun = time.monotonic()
        assert member.ended(LOST) is None
        member.close()
        answers.join(30)
    assert 0.9 < time.monotonic() - begun < 20

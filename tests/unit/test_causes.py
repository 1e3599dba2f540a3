"""Which process failed first, from planted failures and last words."""

from __future__ import annotations

import io
from collections import deque

import pytest

from unidist.launch.causes import Judge
from unidist.launch.console import Console
from unidist.launch.jobs import Failure

HEAD = "Traceback (most recent call last):"
FRAME = '  File "train.py", line 3, in <module>\n    step()\n    ^^^^^^'
FROM = "\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def raised(*errors: str, by: str = FROM, prefix: str = "") -> str:
    text = by.join(f"{HEAD}\n{FRAME}\n{error}\n" for error in errors)
    return "\n".join(prefix + line for line in text.splitlines())


GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:17582."
LOST = "unidist.errors.ProcessLostError: all_reduce over ranks [0, 1]: another process of the group ended"
OWN = "ValueError: rank 1's own"
# What the backends say where somebody is missing when all join.
MISSED = "unidist.errors.BackendNotAvailableError: process"
CONSEQUENCES = [
    raised(f"{MISSED}es [1] of 2 did not come to process 0 within 8 s: check that all 2 were started"),
    raised(f"{MISSED} 1 of 2 could not reach process 0 at 10.0.0.1:29500 within 8 s"),
    raised(f"{MISSED} 0 of 2 did not meet the others at 10.0.0.1:1 within 8 s (processes [1] did not come): are all"),
    raised(f"{MISSED} 1 of 2 did not meet the others at 10.0.0.1:29500 within 8 s (timed out): are all started"),
    raised(LOST),
    raised(GLOO),
    raised(GLOO, LOST),
    raised(GLOO, LOST, prefix="[rank0]: "),
    raised(LOST, "RuntimeError: the step failed"),
    raised(LOST, "OSError: cannot save what is half done", by=DURING),
    raised("horovod.common.exceptions.HorovodInternalError: Horovod has been shut down.\nSecond line"),
    raised("torch.distributed.DistBackendError: NCCL error: remote process exited"),
    raised("jax.errors.JaxRuntimeError: UNKNOWN: Gloo AllGather failed: [gloo/pair.cc:547] Connection closed by peer")
    + "\nFor simplicity, JAX has removed its internal frames from the traceback of the following exception.",
    raised("tensorflow.python.framework.errors_impl.UnavailableError: {{function_node }} Socket closed"),
    "F0101 client.h:80] Terminating process because the JAX distributed service detected fatal errors. "
    "This most likely indicates that another task died; see the other task logs for more details."
    + "\n    @     0x7fb9160f0321  tsl::RPCState<>::OnCompleted()"
    * 40,
    "terminate called after throwing an instance of 'gloo::IoException'\n"
    "  what():  [horovod/common/gloo/http_store.cc:54] Wait timeout after 8 seconds for key(s): 1.",
]
CAUSES = [
    "",
    "a word without a traceback about a ProcessLostError",
    raised(OWN),
    raised("KeyError: 'cached'", OWN, by=DURING),
    raised("ConnectionResetError: [Errno 104] Connection reset by peer"),
    raised(GLOO) + "\nlogged, and tried again\n" + raised(OWN),
    raised("torch.OutOfMemoryError: CUDA out of memory."),
    raised(f"{MISSED} 0 of 2 did not meet the others at 10.0.0.1:1 within 8 s ([Errno 98] Address already in use)"),
]


class Said(Console):
    """A console on which each rank's last words stand, with when they were read."""

    def __init__(self, **words: tuple[float, str]) -> None:
        super().__init__(io.StringIO(), io.StringIO())
        for rank, (when, text) in words.items():
            self._errors[int(rank[1:])] = deque((when, line) for line in text.splitlines())


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("code", [1, -6, -15])
@pytest.mark.parametrize("words", CONSEQUENCES)
def test_a_rank_that_says_that_it_lost_another_is_waited_behind_and_named_last(words: str, code: int) -> None:
    clock, console = Clock(), Said(r0=(90.0, words), r1=(95.0, raised(OWN)))
    judge, missing, cause = Judge(console, 3, clock), Failure(0, code), Failure(1, 3)
    assert not judge.is_settled([missing])
    clock.now += 2.9
    assert not judge.is_settled([missing])
    assert not judge.is_settled([missing, cause])
    clock.now += 0.11
    assert judge.is_settled([missing, cause])
    assert judge.first([missing, cause]) == cause
    assert judge.first([missing]) == missing


@pytest.mark.parametrize("code", [41, -9])
@pytest.mark.parametrize("words", CAUSES)
def test_a_cause_is_waited_for_only_until_its_words_are_read(words: str, code: int) -> None:
    clock, console = Clock(), Said(r0=(90.0, raised(LOST)), r1=(95.0, words))
    judge, failures = Judge(console, 3, clock), [Failure(0, 1), Failure(1, code)]
    assert not judge.is_settled(failures)
    clock.now += 0.11
    assert judge.is_settled(failures)
    assert judge.first(failures) == failures[1]


def test_a_cause_that_does_not_come_is_not_waited_for_long() -> None:
    clock, console = Clock(), Said(r0=(92.0, raised(LOST)), r1=(91.0, raised(GLOO)), r2=(90.0, ""))
    judge, failures = Judge(console, 3, clock), [Failure(0, 1), Failure(1, 1)]
    assert not judge.is_settled(failures[:1])
    clock.now += 9.99
    assert not judge.is_settled(failures)
    clock.now += 0.02
    assert judge.is_settled(failures)
    assert judge.first(failures) == failures[1]


def test_a_rank_that_ended_well_before_others_lost_it_is_the_cause() -> None:
    clock, console = Clock(), Said(r0=(90.0, raised(LOST)), r1=(80.0, ""), r2=(80.0, ""))
    judge, lost = Judge(console, 3, clock), [Failure(0, 1)]
    assert judge.too_soon == ()
    judge.note([1])
    clock.now += 0.5
    judge.note([1])
    assert not judge.is_settled(lost)
    clock.now += 0.11
    judge.note([1, 2])
    # All have ended: the cause is none that is still to come.
    assert judge.is_settled(lost)
    assert judge.first(lost) == lost[0]
    assert judge.too_soon == (1,)


def test_where_all_have_ended_nobody_is_waited_for() -> None:
    clock, console = Clock(), Said(r0=(90.0, raised(LOST)), r1=(91.0, raised(LOST)))
    judge, failures = Judge(console, 2, clock), [Failure(0, 1), Failure(1, 1)]
    assert not judge.is_settled(failures)
    clock.now += 0.11
    assert judge.is_settled(failures)


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_causes_in_one_poll_the_first_is_whose_traceback_began_first(turned: bool) -> None:
    console = Said(r0=(92.0, raised(OWN)), r1=(91.0, raised("KeyError: 1", OWN, by=DURING)))
    failures = [Failure(1, 5), Failure(0, 4)] if turned else [Failure(0, 4), Failure(1, 5)]
    judge = Judge(console, 2, Clock())
    judge.is_settled(failures)
    assert judge.first(failures) == Failure(1, 5)


def test_a_cause_without_a_word_counts_from_when_its_end_was_seen() -> None:
    clock, console = Clock(), Said(r0=(100.02, raised(OWN)), r1=(0.0, ""), r2=(99.9, raised(OWN)))
    judge = Judge(console, 3, clock)
    killed, later, sooner = Failure(1, -9), Failure(0, 1), Failure(2, 1)
    judge.is_settled([killed])
    clock.now += 0.05
    judge.is_settled([later, killed])
    assert judge.first([later, killed]) == killed
    assert judge.first([later, killed, sooner]) == sooner


def test_an_agent_that_fails_is_a_cause() -> None:
    clock = Clock()
    judge, failures = Judge(Said(), 2, clock), [Failure(None, 1)]
    judge.is_settled(failures)
    clock.now += 0.11
    assert judge.is_settled(failures)
    assert judge.first(failures) == failures[0]

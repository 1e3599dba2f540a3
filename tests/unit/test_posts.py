"""What follows from the posts of ranks that wait: who can never go on, who may still come, who failed."""

from __future__ import annotations

import pytest

from unidist.backends.torch import posts
from unidist.backends.torch.posts import Failure, Post, Wait
from unidist.errors import DesyncError, ProcessLostError

PAIR, ALL = (0, 1), (0, 1, 2)


def wait(group: tuple[int, ...], number: int, call: str = "all_reduce()", needs: tuple[int, ...] | None = None) -> Wait:
    return Wait(group=group, number=number, call=call, op="all_reduce", needs=group if needs is None else needs)


def post(rank: int, *waits: Wait, begun: dict[tuple[int, ...], int] | None = None, **more: Failure) -> Post:
    counts = {one.group: one.number for one in waits} | (begun or {})
    return Post(rank=rank, beat=1, begun=counts, waits=waits, **more)


def by_rank(*all_posts: Post) -> dict[int, Post]:
    return {one.rank: one for one in all_posts}


def test_a_post_comes_back_from_its_text() -> None:
    failure = Failure.of(DesyncError("apart", ranks=(0, 1), collective="all_reduce"), PAIR, 3)
    sent = post(1, wait(PAIR, 3), wait(ALL, 1), begun={(1, 2): 7}, failure=failure)
    assert Post.from_json(sent.to_json()) == sent


def test_two_that_wait_for_each_other_are_stuck_and_who_waits_for_them() -> None:
    found = by_rank(post(0, wait(PAIR, 2)), post(1, wait(ALL, 1), begun={PAIR: 1}), post(2, wait(ALL, 1)))
    assert posts.stuck(found) == {0, 1, 2}
    error = posts.deadlock({0, 1, 2}, found)
    assert error.ranks == (0, 1, 2)
    assert "rank 0 waits in all_reduce() in the group of ranks 0, 1, where rank 1 is missing" in str(error)


@pytest.mark.parametrize(
    "others",
    [
        [],  # nothing is known of the one that is missing
        [post(1)],  # it computes
        [post(1, wait(ALL, 1), begun={PAIR: 2})],  # it has come since
        [post(1, wait((1, 2), 1)), post(2)],  # it waits for one that computes
        [post(1, wait((1, 2), 1, needs=(2,))), post(2, begun={(1, 2): 1})],  # its message is on the way
    ],
)
def test_whom_something_may_still_end_is_not_stuck(others: list[Post]) -> None:
    assert posts.stuck(by_rank(post(0, wait(PAIR, 2)), *others)) == frozenset()


def test_a_wait_that_needs_one_rank_does_not_hang_on_another() -> None:
    # A broadcast from rank 2, which computes; rank 1 is late, but no one needs it.
    found = by_rank(post(0, wait(ALL, 1, needs=(2,))), post(1, wait(PAIR, 1)), post(2))
    assert posts.stuck(found) == frozenset()


def test_a_rank_with_a_thread_that_may_go_on_is_not_stuck() -> None:
    found = by_rank(post(0, wait(PAIR, 2), wait((0, 3), 1)), post(1, wait((0, 1, 3), 1), begun={PAIR: 1}))
    assert posts.stuck(found) == frozenset()


def test_other_calls_in_the_same_place_are_a_disagreement() -> None:
    here, there = wait(PAIR, 4), wait(PAIR, 4, "barrier()")
    error = posts.disagreement(0, by_rank(post(0, here), post(1, there)))
    assert error is not None
    assert error.ranks == (0, 1)
    assert "rank 0 calls all_reduce()" in str(error)
    assert "rank 1 calls barrier()" in str(error)
    assert posts.disagreement(0, by_rank(post(0, here), post(1, wait(PAIR, 4)))) is None
    assert posts.disagreement(0, by_rank(post(0, here), post(1, wait(PAIR, 5, "barrier()")))) is None


@pytest.mark.parametrize(
    ("error", "kind"), [(DesyncError("apart", ranks=(1, 2)), DesyncError), (ProcessLostError("gone"), ProcessLostError)]
)
def test_the_failure_of_a_rank_reaches_who_waits_for_it(error: DesyncError | ProcessLostError, kind: type) -> None:
    failed = Failure.of(error, (1, 2), 5)
    found = posts.failed_for(wait(PAIR, 3), by_rank(post(1, begun={PAIR: 2}, failure=failed)))
    assert isinstance(found, kind)
    assert str(error) in str(found)
    # It came before it failed; it failed in this very call; it is not needed.
    assert posts.failed_for(wait(PAIR, 3), by_rank(post(1, begun={PAIR: 3}, failure=failed))) is None
    assert posts.failed_for(wait((1, 2), 5), by_rank(post(1, begun={(1, 2): 5}, failure=failed))) is not None
    assert posts.failed_for(wait(PAIR, 3, needs=(0,)), by_rank(post(1, failure=failed))) is None

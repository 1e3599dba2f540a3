"""Worlds that wait for most of their time: those of a file's tests run some at once, and each test looks at its own.

@pytest.fixture(scope="module")
def outcomes(request):
    return found_by(request, {"test_of_one": first, "test_of_many[a]": second})

def test_of_one(outcomes):
    assert outcomes("test_of_one") == 3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

# With more, two cores are so busy that seconds of a timeout pass while nobody waits.
AT_ONCE = 3


def found_by(
    request: pytest.FixtureRequest, programs: Mapping[str, Callable[[], Any]], at_once: int = AT_ONCE
) -> Callable[[str], Any]:
    """Runs the programs of those tests of the file that run, by their names; gives a test its program's result.

    All have ended when this returns: pytest changes the environment from test to test, which a world reads as it
    starts. What a program raises is raised where its result is asked for.
    """
    chosen = {item.name for item in request.session.items if item.path == request.path}
    with ThreadPoolExecutor(at_once) as pool:
        found: dict[str, Future[Any]] = {
            name: pool.submit(program) for name, program in programs.items() if name in chosen
        }
    return lambda name: found[name].result()

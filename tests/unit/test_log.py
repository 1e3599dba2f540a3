"""The log is silent until asked; UNIDIST_LOG writes it to standard error, of the first process alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

import unidist
from unidist import log

PROGRAM = """
import logging
import unidist

unidist.use("sim")
logging.getLogger("unidist.keras").warning("of one of its own")
assert not logging.getLogger().handlers
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Starts the log of a process that has a number, under an environment."""

    def started(place: Callable[[], int | None], **environment: str) -> None:
        for name in (log.VARIABLE, log.RANKS):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        log.start(place)

    yield started
    started(lambda: None)


@pytest.mark.parametrize(
    ("said", "lines"),
    [
        ("", []),
        ("warning", ["WARNING: of one of its own"]),
        ("Debug", ["DEBUG: using 'sim' (as asked), KERAS_BACKEND=torch", "WARNING: of one of its own"]),
    ],
)
def test_a_program_is_silent_unless_asked(said: str, lines: list[str]) -> None:
    env = os.environ | {"KERAS_BACKEND": "torch", "UNIDIST_LOG": said}
    env.pop("UNIDIST_LOG_RANKS", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr.splitlines()) == ("", [f"unidist 0 {line}" for line in lines])


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("UNIDIST_LOG", "verbose", "'debug', 'info' or 'warning', found 'verbose'"),
        ("UNIDIST_LOG_RANKS", "0", "'first' or 'all', found '0'"),
    ],
)
def test_what_the_variables_may_not_say(monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(unidist.CapabilityError, match=f"{name} must be {allowed}"):
        unidist.use("sim")


def test_the_first_process_writes(start: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """A process knows its number once it has joined, and keeps it when it has left."""
    place: list[int | None] = [None]
    logger = logging.getLogger("unidist.somewhere")

    def told(**environment: str) -> list[str]:
        start(lambda: place[0], UNIDIST_LOG="info", **environment)
        for number in (None, 1, None, 0):
            place[0] = number
            logger.info("at %s", number)
            logger.debug("not asked for")
        return capsys.readouterr().err.splitlines()

    assert told() == ["unidist 0 INFO: at None", "unidist 0 INFO: at 0"]
    everywhere = ["unidist 0 INFO: at None", "unidist 1 INFO: at 1", "unidist 1 INFO: at None", "unidist 0 INFO: at 0"]
    assert told(UNIDIST_LOG_RANKS="all") == everywhere
    start(lambda: 0)
    logger.warning("off again")
    assert capsys.readouterr().err == ""
    assert logging.getLogger("unidist").level == logging.NOTSET


def test_what_takes_long_says_so_once_by_the_first_process(
    start: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "PATIENCE", 0.05)
    for number in (None, 1, 0):
        start(lambda number=number: number)
        with log.while_long("planning"), log.while_long("planning"):
            time.sleep(0.2)
        said = capsys.readouterr()
        assert said.err.splitlines() == ([] if number else ["unidist: planning...", "unidist: planning took 0 s"])
        assert said.out == ""
    monkeypatch.setattr(log, "PATIENCE", 1.0)
    with log.while_long("planning"):
        pass
    with pytest.raises(KeyError), log.while_long("planning"):
        raise KeyError
    assert capsys.readouterr().err == ""

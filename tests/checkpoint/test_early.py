"""The system is asked to bring runs of bytes to the disk, each once, and what it answers changes nothing."""

from __future__ import annotations

import os

import pytest

from unidist.checkpoint.disk import Early

MIB = 1 << 20


@pytest.mark.parametrize("answers", [True, False])
def test_each_run_is_asked_for_once_it_is_long_or_has_ended(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hint(descriptor: int, begin: int, length: int, how: int) -> None:
        asked.append((descriptor, begin, length, how))
        if not answers:
            raise OSError

    monkeypatch.setattr(os, "posix_fadvise", hint)
    file = Early(7)
    for begin in (*range(0, 20), 30, 31, 50):
        file.wrote(begin * MIB, (begin + 1) * MIB)
    runs = [(0, 8), (8, 8), (16, 4), (30, 2)]
    assert asked == [(7, begin * MIB, length * MIB, os.POSIX_FADV_DONTNEED) for begin, length in runs]

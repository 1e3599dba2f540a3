"""UNIDIST_CHECK: how much processes compare."""

from __future__ import annotations

import pytest

from unidist.backends.checking import VARIABLE, checks_all
from unidist.errors import CapabilityError


def test_what_is_new_is_compared_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not checks_all()
    for said, wanted in (("first", False), ("all", True)):
        monkeypatch.setenv(VARIABLE, said)
        assert checks_all() is wanted
    monkeypatch.setenv(VARIABLE, "none")
    with pytest.raises(CapabilityError, match='must be "first"'):
        checks_all()

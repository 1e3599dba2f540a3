"""What the tests of `unidist doctor` ask of checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unidist.doctor.check import Check


def of(checks: Sequence[Check], name: str) -> Check:
    found = [check for check in checks if check.name == name]
    assert len(found) == 1, [check.name for check in checks]
    return found[0]


def is_said(check: Check, status: str, found: str, advice: str) -> None:
    """Whoever reads the line knows what was asked, what was found and what to do."""
    assert check.status == status, check
    assert check.asked
    assert found in check.found, check
    assert advice in check.advice, check
    assert check.advice


def resolved(*addresses: str) -> Callable[[str], list[str]]:
    return lambda name: list(addresses)

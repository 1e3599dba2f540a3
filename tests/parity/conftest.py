"""Fixtures of the parity suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.worlds import Alone, Worlds


@pytest.fixture(scope="session")
def alone() -> Iterator[Alone]:
    """What one device computes."""
    found = Alone()
    yield found
    found.close()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """What many devices compute."""
    found = Worlds()
    yield found
    found.close()

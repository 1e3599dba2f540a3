"""torch is left as other tests know it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unidist.backends.torch.sharded import take_off


@pytest.fixture(scope="module", autouse=True)
def entrances_are_put_back() -> Iterator[None]:
    yield
    take_off()

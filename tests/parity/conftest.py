"""The order of the tests that worlds are kept for: those of this folder, and of the promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.worlds import SETTINGS, Worlds

_ORDER = list(SETTINGS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests of one setting follow each other: its world is started once."""
    here = Path(__file__).parent
    places = [k for k, item in enumerate(items) if item.path.parent in (here, here.with_name("promises"))]
    files = list(dict.fromkeys(items[k].path for k in places))
    ours = sorted((items[k] for k in places), key=lambda item: (files.index(item.path), _setting(item)))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


def _setting(item: pytest.Item) -> int:
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return min((_ORDER.index(name) for name in names if isinstance(name, str) and name in SETTINGS), default=-1)


@pytest.fixture(scope="module", autouse=True)
def no_horovod_idles(worlds: Worlds) -> Iterator[None]:
    yield
    worlds.end_horovods()

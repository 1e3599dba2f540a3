"""A file a promise, on every backend: its programs are beside what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.conftest import no_horovod_idles
from tests.parity.worlds import SETTINGS, Alone, Worlds
from tests.support.comparing import same

__all__ = ["no_horovod_idles"]
Check = Callable[..., list[Any]]


@pytest.fixture
def as_alone(worlds: Worlds, alone: Alone) -> Check:
    """Checks that a program gives one device's numbers on every process, and gives what it recorded there."""

    def check(setting: str, kind: str, zero: int, program: Any, *args: Any) -> list[Any]:
        keras = SETTINGS[setting].keras
        wanted = alone.run(keras, program, None, 0, *args)
        results = worlds.get(setting).call(program, kind, zero, *args)
        for found in results:
            same(found, wanted)
            assert bool(found["sharded"]) == (zero > 0 or kind != "dp")
            assert found["spread"] == (4 if keras == "jax" else 0)
        return results

    return check

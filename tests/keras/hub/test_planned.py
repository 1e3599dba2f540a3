"""A plan and the ledger agree to the byte, for keras_hub's backbones."""

from __future__ import annotations

import random

import pytest

from tests.keras.hub import planned, zoo
from tests.support.sampling import SEED, unless_all

EVERY = [(name, kind) for name in zoo.BACKBONES for kind in planned.KINDS]
# Each backbone with a kind or two.
_DRAWN = random.Random(SEED).sample(list(zoo.BACKBONES), len(zoo.BACKBONES))
SOME = [(name, list(planned.KINDS)[k % len(planned.KINDS)]) for k, name in enumerate(_DRAWN)]


@pytest.mark.parametrize(("name", "kind"), unless_all(SOME, EVERY))
def test_a_step_sends_what_is_planned_to_the_byte(name: str, kind: str) -> None:
    planned_bytes, sent = planned.bytes_of_a_step(name, kind)
    assert planned_bytes == sent > 0

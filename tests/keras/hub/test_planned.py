"""A plan and the ledger agree to the byte, for keras_hub's backbones."""

from __future__ import annotations

import random

import pytest

from tests.keras.hub import planned, zoo
from tests.support.sampling import SEED, unless_all

EVERY = [(name, kind) for name in zoo.BACKBONES for kind in planned.KINDS]
# Each kind with every sixth backbone, none of them twice.
_DRAWN = random.Random(SEED).sample(list(zoo.BACKBONES), 16)
SOME = [(name, planned.KINDS[k % 4]) for k, name in enumerate(_DRAWN)]


@pytest.mark.parametrize(("name", "kind"), unless_all(SOME, EVERY))
def test_a_step_sends_what_is_planned_to_the_byte(name: str, kind: str) -> None:
    planned_bytes, sent = planned.bytes_of_a_step(name, kind)
    assert planned_bytes > 0
    besides = sent - planned_bytes
    assert besides == 0 or (besides > 0 and kind == "model" and name in planned.BESIDES)

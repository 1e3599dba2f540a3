"""On DTensor a cut table trains with every optimizer as on one device, which is Keras on TensorFlow's own way: the
gradients of an id that repeats in a batch count one by one."""

from __future__ import annotations

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

# Each optimizer divides or multiplies rows by their ids in a way of its own; eager, no trace says what it will be.
CASES = [
    ("adagrad", "features", 0, True),
    ("rmsprop", "found", 3, False),
    ("adadelta", "vocabulary", 1, False),
    *unless_all(
        (),
        [
            (name, cut, zero, False)
            for name in ("adagrad", "rmsprop", "adadelta", "adamax", "lamb")
            for cut in ("vocabulary", "features", "found")
            for zero in (0, 1, 3)
        ],
    ),
]


@pytest.mark.parametrize(("name", "cut", "zero", "is_eager"), CASES)
def test_ids_that_repeat(name: str, cut: str, zero: int, is_eager: bool, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("tensorflow", "tests.parity.repeated:trained", None, 0, name)
    found = worlds.get("tensorflow-4").call("tests.parity.repeated:trained", cut, zero, name, is_eager)[0]
    same(found, wanted)
    assert any("embeddings" in path for path in found["sharded"])

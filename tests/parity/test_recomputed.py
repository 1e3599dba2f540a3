"""With remat= a model trains as one device that keeps every activation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.recomputed:trained"
AS_PROGRAMS = "tests.keras.torch.promised:run"
BLOCKS = [f"block_{k}" for k in range(2)]
PLACES = [
    *(("sim-torch", kind, zero, "block") for kind, zero in (("2x2", 1), ("mp", 0))),
    ("sim-torch", "dp", 3, "attention"),
    ("torch-2", "dp", 3, "block"),
    ("horovod-2", "dp", 0, "block"),
    ("jax-4", "dp", 0, "block"),
    # XLA cuts what is recomputed as what is not: one place has another mesh, stored shards and attention at once.
    *unless_all(
        (("jax-4", "2x2", 3, "attention"),),
        (
            *(("jax-4", kind, zero, "block") for kind, zero in (("dp", 3), ("2x2", 0))),
            *(("jax-4", kind, zero, "attention") for kind, zero in (("dp", 0), ("2x2", 3))),
        ),
    ),
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda keras, *args: alone.run(keras, RUN, None, 0, "none", *args)


@pytest.mark.parametrize(("setting", "kind", "zero", "remat"), PLACES)
def test_it_trains_as_one_device(setting: str, kind: str, zero: int, remat: str, expected: Any, worlds: Worlds) -> None:
    wanted = expected("jax" if setting.startswith("jax") else "torch")
    for found in worlds.get(setting).call(RUN, kind, zero, remat):
        same(found, wanted)
        assert found["_again"] == [name if remat == "block" else f"{name}/attention" for name in BLOCKS]
        assert found["_sent"] or setting.startswith("jax")


def test_programs_recompute(expected: Any, worlds: Worlds) -> None:
    """Of full batches: a ragged one would be traced once more, for as long."""
    rows = 8
    for found in worlds.get("torch-2").call(AS_PROGRAMS, RUN, "dp", 0, "block", rows):
        same(found, expected("torch", rows))
        assert found["_unfit"] == []


def test_of_eight_blocks_one_is_held_and_the_inputs_of_all(worlds: Worlds) -> None:
    """And nothing waits for Python to look for cycles."""
    every, again = (worlds.get("torch-2").call("tests.keras.recomputed:peak", remat) for remat in ("none", "block"))
    for (one, left), (other, _) in zip(again, every, strict=True):
        assert one / other < 0.35, (one, other)  # the inputs of all, what one holds, and gradients
        assert left / other < 0.1, (left, other)


def test_tensorflow_refuses(worlds: Worlds) -> None:
    with pytest.raises(Exception, match="remat='block': with Keras on 'tensorflow'"):
        worlds.get("sim-tensorflow").call(RUN, "dp", 0, "block")

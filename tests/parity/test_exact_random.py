"""With exact_random=True layers that draw train as on one device, to the last mask."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.drawn:trained"
AS_PROGRAMS = "tests.keras.torch.promised:run"
CASES = ("images", "augmented", "channels", "alpha", "steps", "recurrent", "attention")
PLACES = [
    *(("sim-torch", "dp", 0, case, 5) for case in CASES),
    *(
        ("sim-torch", kind, zero, "images", seed)
        for kind, zero, seed in (("dp", 3, None), ("2x2", 1, 5), ("mp", 0, None))
    ),
    *(("torch-2", "dp", zero, "images", seed) for zero, seed in ((0, 5), (0, None), (3, 5))),
    *(("torch-2", "dp", 0, case, 5) for case in ("recurrent", "attention")),
    ("horovod-2", "dp", 0, "images", 5),
    # Three devices, whose parts of a batch are of different lengths.
    *((setting, "dp", 0, "images", 5) for setting in unless_all((), ("torch-3", "horovod-3"))),
    *(("jax-4", kind, zero, "images", 5) for kind, zero in (("dp", 0), ("dp", 3), ("2x2", 0))),
    ("tensorflow-4", "2x2", 3, "images", 5),
    *(("tensorflow-4", "dp", 0, case, 5) for case in unless_all(("augmented",), CASES)),
]


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda keras, *args: alone.run(keras, RUN, None, 0, *args)


@pytest.mark.parametrize(("setting", "kind", "zero", "case", "seed"), PLACES)
def test_it_trains_as_one_device(
    setting: str, kind: str, zero: int, case: str, seed: int | None, expected: Any, worlds: Worlds
) -> None:
    of_itself = setting.partition("-")[0] if setting.startswith(("jax", "tensorflow")) else "torch"
    wanted = expected(of_itself, case, seed)
    for found in worlds.get(setting).call(RUN, kind, zero, case, seed):
        same(found, wanted)
        assert found["_sent"] or of_itself == "jax"


def test_layers_that_draw_between_cut_ones(worlds: Worlds) -> None:
    (found,) = worlds.get("sim-torch").call(RUN, "2x2", 0, "images", 5)
    assert "column: its outputs stay cut" in found["_why"]
    assert found["sharded"]


@pytest.mark.parametrize("case", ["images", "recurrent"])
def test_programs_draw_as_one_device(case: str, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.run("torch", RUN, None, 0, case, 5)
    for found in worlds.get("torch-2").call(AS_PROGRAMS, RUN, "dp", 0, case, 5):
        same(found, wanted)
        assert (found["_programs"], found["_unfit"]) == (4, [])


def test_horovod_refuses_it_on_tensorflow(worlds: Worlds) -> None:
    with pytest.raises(Exception, match=r"exact_random=True: use\('horovod'\) with Keras on TensorFlow"):
        worlds.get("horovod-2-tensorflow").call(RUN, "dp", 0, "images", 5)

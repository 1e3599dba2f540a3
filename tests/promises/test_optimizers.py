"""Whatever the optimizer, training is one device's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import Alone, Worlds
from tests.promises.conftest import Check
from tests.promises.places import everywhere
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes
PROMISES = [
    *("clipnorm", "global clipnorm", "clipvalue", "schedule", "ema", "ema at the end", "accumulation"),
    *("scaled accumulation", "decay", "overflow", "scaled"),
]
# Which update their parts as ever, or are given whole variables.
OTHERS = ["rmsprop", "lion", "adagrad", "nadam", "adafactor", "lamb", "muon", "schedule free", "several"]
# Which override what sees all gradients.
OVERRIDDEN = ["own apply", "own gradients"]
OF_MORE = ["clipnorm", "global clipnorm", "adafactor", "lamb", "muon"]
# Promises that one optimizer can keep at once, together: each program takes seconds to compile.
TOGETHER = ["clipnorm, schedule, ema", "global clipnorm, decay", "scaled accumulation"]
# XLA and DTensor cut updates of each number as any operation; in "several" a part is Muon's.
NAMES = {
    "torch": [*PROMISES, *OTHERS, *OVERRIDDEN],
    "jax": unless_all(
        [*TOGETHER, "clipvalue, ema at the end", "overflow", "adafactor", "schedule free", "several"],
        [*PROMISES, *OTHERS],
    ),
    "tensorflow": unless_all([*TOGETHER, "adafactor", "several"], [*PROMISES, *OTHERS]),
    # Gradients are whole everywhere, and Keras and its user do the rest.
    "horovod-2-tensorflow": unless_all(["clipnorm, schedule, ema", "own apply"], [*PROMISES, *OVERRIDDEN]),
}


def optimized(kind: str | None, zero: int, name: str) -> dict[str, Any]:
    from tests.support import nets
    from tests.support.optimizers import OPTIMIZERS

    with nets.begun(kind, zero):
        model, optimizer = nets.plain(), OPTIMIZERS[name]()
        if "decay" in name:
            # By a name, and by itself, before it is placed.
            optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["bias"])
        nets.crossed(model, optimizer)
    # Some evaluate other weights than they train.
    return nets.fitted_on_even(model, evaluates="ema" in name or "free" in name)


def _fits(_: str, kind: str, zero: int, name: str) -> bool:
    # What looks at more than a part is for where there are parts.
    return kind != "dp" or zero > 0 or name not in OF_MORE


@pytest.mark.parametrize(("setting", "kind", "zero", "name"), everywhere(NAMES, _fits))
def test_it_trains_as_one_device(setting: str, kind: str, zero: int, name: str, as_alone: Check) -> None:
    as_alone(setting, kind, zero, optimized, name)


@pytest.mark.parametrize("keras", ["torch", "jax"])
def test_an_overflow_skips_the_step(keras: str, alone: Alone) -> None:
    """The case above is one: its first losses overflow, and the scale goes down."""
    assert alone.run(keras, optimized, None, 0, "overflow")["slots"][1] < 2.0**127


def averaged_twice(kind: str, zero: int) -> int:
    """Fits, evaluates and fits again with averages of the weights; the number of steps."""
    import numpy as np

    from tests.support import nets
    from tests.support.optimizers import OPTIMIZERS

    with nets.begun(kind, zero):
        model = nets.crossed(nets.plain(), OPTIMIZERS["ema"]())
    for _ in range(2):
        nets.fitted(model, *nets.rows(12), evaluated=nets.BATCH)
    return int(np.asarray(model.optimizer.iterations))


def test_averages_outlive_an_evaluation(worlds: Worlds) -> None:
    """Keras gives the variables the averages' own arrays, which an evaluation on JAX then deletes."""
    assert worlds.get("sim-jax").call(averaged_twice, "dp", 3) == [6]


@pytest.mark.parametrize("setting", ["sim-torch", "torch-2"])
def test_all_gradients_of_an_accumulation_are_refused(setting: str, worlds: Worlds) -> None:
    for outcome in worlds.get(setting).outcomes(optimized, "dp", 0, "own apply, accumulation").values():
        assert outcome.failure is not None
        assert "OfAllGradients overrides apply, which is not given whole gradients with" in str(outcome.failure)

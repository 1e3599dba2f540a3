"""One process wishes to stop a training, by a clock or a signal: all end it behind the same step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.worlds import Worlds
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

SETTINGS = ["torch-2", "jax-2x2", *unless_all([], ["horovod-2", "horovod-2-tensorflow", "tensorflow-2x2"])]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("kind", "which", "steps"),
    [("step", (1,), 6), ("step", (0, 1), 6), ("callback of one", (1,), 6), ("epoch", (1,), 5), ("thread", (1,), None)],
    ids=str,
)
def test_all_stop_behind_one_step(
    setting: str, kind: str, which: tuple[int, ...], steps: int | None, worlds: Worlds
) -> None:
    """Where code of a callback says so, at the very step; else as soon as the processes look. There are 1,600 steps."""
    results = worlds.get(setting).call("tests.parity.stopping:stop", kind, which)
    assert len({made for made, _, _ in results}) == 1
    made = results[0][0]
    assert made == steps if steps else 5 < made < 1600
    for _, stopped, weights in results:
        assert stopped
        for one, other in zip(weights, results[0][2], strict=True):
            np.testing.assert_array_equal(one, other)

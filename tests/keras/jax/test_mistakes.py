"""The comparisons of this folder fail where the engine is broken on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.comparing import same
from unidist.testing.processes import ProcessFailedError, ProcessWorld

PROGRAMS = "tests.keras.jax.programs"
BEHAVIOURS = "tests.keras.jax.behaviours"


def broken(world: ProcessWorld, mistake: str, program: str, *args: Any) -> Any:
    return world.call("tests.keras.jax.mistakes:run_with", mistake, program, *args)


def test_padding_that_counts_changes_the_numbers(four: ProcessWorld, one: ProcessWorld) -> None:
    expected = one.call(f"{PROGRAMS}:train", "mlp", "momentum", None)[0]
    found = broken(four, "padding counts as rows", f"{PROGRAMS}:train", "mlp", "momentum", "dp")[0]
    for key in ("history", "weights"):
        with pytest.raises(AssertionError):
            same({**expected, key: found[key]}, expected)


def test_an_undistributed_fit_sends_nothing(four: ProcessWorld) -> None:
    found = broken(four, "nothing is distributed outside of the scope", f"{BEHAVIOURS}:entrance", "2x2", "outside")[0]
    assert found["sent"] == 0


def test_slots_that_stay_are_not_sharded(four: ProcessWorld) -> None:
    found = broken(four, "slots stay behind", f"{BEHAVIOURS}:parallelized", (None, "2x2"))[0]
    assert not [path for path in found["sharded"] if "momentum" in path]


def test_a_replicated_batch_sends_no_gradients(four: ProcessWorld) -> None:
    found = broken(four, "every device computes the whole batch", f"{BEHAVIOURS}:traffic", "dp", 16, 8)[0]
    assert found["fit"]["bytes"] == 0


@pytest.mark.processes
def test_seeds_that_differ_are_told(pair: ProcessWorld) -> None:
    """The processes would start from other weights, shuffle apart, and each take its rows of another batch."""
    with pytest.raises(ProcessFailedError, match=r"DesyncError: fit: variable .* has other values on ranks \[\d\]"):
        broken(pair, "seeds differ by process", f"{PROGRAMS}:train", "mlp", "momentum", "dp")

"""What torch's ranks hold, send and draw, counted: the closed forms of ZeRO, in the simulator and in real processes.

(On JAX: tests/keras/jax/test_zero.py. On TensorFlow the compiler chooses what is sent: test_tensorflow.py.)
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.parity.worlds import SETTINGS, Alone, Worlds
from tests.support.comparing import same
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes

RUN = "tests.keras.counted:{}".format
STEPS = 3
PLACES = ["sim-torch", "torch-2", "torch-4", "horovod-2"]
# Stages 1 and 2 are the same layouts (tests/unit/test_strategies.py).
IN_PARTS = unless_all([1, 3], [1, 2, 3])


def devices(setting: str) -> int:
    return SETTINGS[setting].devices or SETTINGS[setting].processes


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Any:
    return lambda program: alone.run("torch", RUN(program), None, 0)


# What a fit sends for; all but the first three are a few numbers an epoch.
PURPOSES = {"gradient", "parameters", "metrics", "random state", "views of the data", "agreement"}


# what is sent ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", PLACES)
@pytest.mark.parametrize(
    ("zero", "bucket_mb", "buckets"),
    [(1, None, 1), (2, "0.001", 6), *unless_all([], [(2, None, 1), (1, "0.001", 6)])],
)
def test_states_in_parts_send_twice_the_part(
    setting: str, zero: int, bucket_mb: str | None, buckets: int, worlds: Worlds
) -> None:
    """2 (n-1)/n P a step, and nothing else but what joins the metrics at the end."""
    once = Fraction(devices(setting) - 1, devices(setting))
    for sizes, sent in worlds.get(setting).call(RUN("sent"), zero, bucket_mb=bucket_mb):
        assert sent[("reduce_scatter", "gradient")] == (STEPS * buckets, STEPS * once * sum(sizes))
        assert sent[("all_gather", "parameters")] == (STEPS, STEPS * once * sum(sizes))
        assert {why for _, why in sent} <= PURPOSES
        assert len([why for _, why in sent if why in ("gradient", "parameters")]) == 2


@pytest.mark.parametrize("setting", PLACES)
@pytest.mark.parametrize("merged", [False, True])
def test_values_in_parts_send_thrice_the_part(setting: str, merged: bool, worlds: Worlds) -> None:
    """3 (n-1)/n P, but for what is still there when backward wants it (the last two layers) and what it never reads
    (the first layer's, whose input needs no gradient); 2 (n-1)/n P where all is one unit, which is kept in between."""
    once = Fraction(devices(setting) - 1, devices(setting))
    for sizes, sent in worlds.get(setting).call(RUN("sent"), 3, merged=merged):
        again = [] if merged else sizes[1:-2]
        fetches = 1 if merged else len(sizes) + len(again)
        assert sent[("all_gather", "parameters")] == (STEPS * fetches, STEPS * once * (sum(sizes) + sum(again)))
        assert sent[("reduce_scatter", "gradient")] == (STEPS, STEPS * once * sum(sizes))
        assert {why for _, why in sent} <= PURPOSES


@pytest.mark.parametrize("setting", PLACES)
@pytest.mark.parametrize("zero", [0, *IN_PARTS])
def test_steps_of_an_accumulation_send_no_gradients(setting: str, zero: int, expected: Any, worlds: Worlds) -> None:
    """At stage 3 they are sent: whole gradients would undo it. There the steps are alike."""
    for found in worlds.get(setting).call(RUN("accumulated"), "dp", zero):
        same(found, expected("accumulated"))
        gradients = [step.get("gradient", 0.0) for step in found["steps"]]
        assert len(gradients) == 6
        for between, full in list(pairwise(gradients))[::2]:
            assert full > 0
            assert between == (full if zero == 3 else 0)
        if zero < 3:
            assert all(not step.get("parameters") for step in found["steps"][2::2])


@pytest.mark.parametrize("setting", ["torch-2", "torch-4", "horovod-2"])
@pytest.mark.parametrize("zero", [0, 3])
def test_metrics_are_joined_once_an_epoch(setting: str, zero: int, worlds: Worlds) -> None:
    """All of them at once, where nobody reads the logs of steps."""
    assert worlds.get(setting).call(RUN("metrics_sent"), zero, 0) == [2] * devices(setting)


# what is held ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", PLACES)
@pytest.mark.parametrize("zero", IN_PARTS)
def test_bytes_held_are_the_ideal(setting: str, zero: int, worlds: Worlds) -> None:
    """4P + 4P + 8P/N at stage 1, 4P + 4P/N + 8P/N at 2, 16P/N at 3; gradients are in parts at stage 1 too."""
    for ranks in worlds.get(setting).call(RUN("held"), zero):
        for found in ranks:
            whole = found["whole"]
            part = whole / devices(setting)
            ideal = {"values": whole if zero < 3 else part, "gradients": part, "slots": 2 * part}
            for kind, wanted in ideal.items():
                assert wanted <= found[kind] <= 1.05 * wanted, (kind, found)


# what is drawn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["sim-torch", "torch-4", "horovod-4"])
def test_dropout_draws_alike_on_replicas_and_apart_on_parts(setting: str, worlds: Worlds) -> None:
    """Of 0, 1 and of 2, 3, which have the same rows: alike where units are whole, apart where they are cut."""
    drawn = {rank: kept for found in worlds.get(setting).call(RUN("masks")) for rank, kept in found.items()}
    assert sorted(drawn) == [0, 1, 2, 3]
    early, between = ([drawn[rank][k] for rank in range(4)] for k in (0, 1))
    assert early[0].shape == (4, 12)
    assert between[0].shape == (4, 8)
    for a, b in ((0, 1), (2, 3)):
        np.testing.assert_array_equal(early[a], early[b])
        assert (between[a] != between[b]).any()
    assert (early[0] != early[2]).any()
    for a, b in ((0, 2), (0, 3), (1, 2), (1, 3)):
        assert (between[a] != between[b]).any()

"""Stored shards under a mixed policy on JAX: 16 bits are gathered, and layers of other dtypes have exact weights."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from tests.support.comparing import same
from tests.support.sampling import unless_all
from unidist.testing.processes import ProcessWorld

PROGRAM = "tests.keras.jax.low:trained"
SHORT = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}


@cache
def trained(world: ProcessWorld, *args: Any) -> dict[str, Any]:
    """The same model under the same strategy is trained once for all tests that look at it."""
    found: dict[str, Any] = world.call(PROGRAM, *args)[0]
    return found


def test_half_the_bytes_are_gathered_and_gradients_go_as_they_are(four: ProcessWorld) -> None:
    """As compiled for CPUs, where bfloat16 is made float32 again."""
    found = trained(four, "dense", "mixed_float16", "dp", 3)
    whole = 3 * found["weights' bytes"] * 3 / 4
    assert found["sent"]["all_gather"] == (3 * 6, whole / 2)
    assert found["sent"]["reduce_scatter"] == (3 * 6, whole)


@pytest.mark.parametrize("policy", SHORT)
@pytest.mark.parametrize("kind", ["dp", "2x2"])
def test_the_program_asks_for_16_bits_as_often_as_for_32(four: ProcessWorld, policy: str, kind: str) -> None:
    """Six in forward, and in backward two kernels again: behind the first one nothing is to be learned."""
    assert trained(four, "dense", "float32", kind, 3)["asked"] == {"f32": 8}
    assert trained(four, "dense", policy, kind, 3)["asked"] == {SHORT[policy]: 8}


# Each model once, under each policy.
TRAINED = [("dense", "mixed_float16"), ("twice", "mixed_bfloat16"), ("recurrent", "mixed_bfloat16")]
EVERY = list(itertools.product(("dense", "twice", "recurrent"), SHORT))


@pytest.mark.parametrize(("name", "policy"), unless_all(TRAINED, EVERY))
def test_it_trains_as_values_that_rest_whole(four: ProcessWorld, name: str, policy: str) -> None:
    """Whose casts are those of one device."""
    found, wanted = (trained(four, name, policy, "dp", zero) for zero in (3, 1))
    same(found, wanted)


@pytest.mark.parametrize("name", ["twice", "recurrent"])
def test_what_is_read_again_is_gathered_as_it_is_stored(four: ProcessWorld, name: str) -> None:
    """Gradients of several reads, or of a loop's steps, are added in 32 bits, as on one device."""
    asked = trained(four, name, "mixed_bfloat16", "dp", 3)["asked"]
    # The dense layer's two, whose kernel has nothing to be learned behind it.
    assert asked["bf16"] == 2
    assert asked["f32"] > 2


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", ["exact", "a cell of its own dtype"])
def test_weights_of_32_bits_inside_a_layer_of_16_are_exact(
    four: ProcessWorld, one: ProcessWorld, name: str, zero: int
) -> None:
    found = trained(four, name, "mixed_bfloat16", "dp", zero)
    same(found, trained(one, name, "mixed_bfloat16", None, 0))
    assert found["sent"]["reduce_scatter"][0] > 0

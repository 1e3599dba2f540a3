"""Layouts found by themselves train to one device's numbers, on JAX's virtual devices."""

from __future__ import annotations

import numpy as np
import pytest

MESHES = ({"model": 4}, {"data": 2, "model": 2})
CASES = [("bert", 0, True), ("gpt2", 1, False), ("llama_mqa", 1, False), ("gemma", 0, False)]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "mesh", "in_scope"), CASES)
def test_training_equals_one_device(one, four, name, mesh, in_scope) -> None:
    expected = one.call("tests.planner.programs:train", name, None)[0]
    found = four.call("tests.planner.programs:train", name, MESHES[mesh], in_scope)[0]
    assert found["sent"] > 0
    assert found["planned"]
    weights = {path: layout for path, layout in found["layouts"].items() if path in found["planned"]}
    assert weights == found["planned"]
    # AdamW's two slots of each are laid out as it is.
    assert len(found["layouts"]) == 3 * len(found["planned"])
    np.testing.assert_allclose(found["outputs"], expected["outputs"], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-5, rtol=1e-5)
    for (path, value), (_, wanted) in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5, rtol=1e-5, err_msg=path)


@pytest.mark.processes
def test_experts_are_planned_as_they_are_computed(four) -> None:
    """What the kernels of a stack give is summed, and so is the gradient of what they take. The compiler sums the
    gradients of several products of one tensor one by one, so it sends more than is planned."""
    found = four.call("tests.planner.programs:experts", {"model": 4})[0]
    tokens = 4 * 5 * 8 * 4 * 2 * 3 / 4
    assert found["of experts"] == [("all_reduce", tokens)] * 4
    assert 0.6 * found["sent"] < found["planned"] < found["sent"]

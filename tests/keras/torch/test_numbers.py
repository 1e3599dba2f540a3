"""Numbers of one device from parts of a batch, without a world: NumPy on the whole batch is the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unidist.keras import numbers


def moments_of_parts(parts, dims, masks):
    """What each part computes, given what all would send."""
    sent = []

    def send(values):
        sent.append(values)
        return [torch.stack([value]) for value in values]

    for part, mask in zip(parts, masks, strict=True):
        numbers.moments(part, dims, mask, torch.sum, send)
    stacked = [torch.stack(values) for values in zip(*sent, strict=True)]
    return [
        numbers.moments(part, dims, mask, torch.sum, lambda values: stacked)
        for part, mask in zip(parts, masks, strict=True)
    ]


@pytest.mark.parametrize("rows", [(3, 3, 3), (4, 3, 2), (5, 4, 0)], ids=str)
@pytest.mark.parametrize("dims", [[0, 1], [0, 2]], ids=["last", "middle"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_moments_are_those_of_all_rows(rows, dims, masked):
    rng = np.random.default_rng(0)
    # A mean that is large against the deviation: sums of squares would lose all digits.
    x = rng.normal(3000.0, 0.5, (9, 4, 6)).astype("float32")
    mask = rng.random((9, 4)) < 0.7 if masked else np.ones((9, 4), bool)
    parts = torch.split(torch.tensor(x), rows)
    masks = torch.split(torch.tensor(mask), rows) if masked else [None] * 3
    weights = np.broadcast_to(mask[..., None], x.shape).astype("float64")
    mean = np.average(x.astype("float64"), tuple(dims), weights, keepdims=True)
    variance = np.average((x - mean) ** 2, tuple(dims), weights)
    for found_mean, found_variance in moments_of_parts(parts, dims, masks):
        np.testing.assert_allclose(found_mean, mean.squeeze(), rtol=1e-6)
        # Of numbers near 3000 float32 holds 2e-4.
        np.testing.assert_allclose(found_variance, variance, rtol=1e-3)


def test_shares_add_up_and_one_of_nothing_counts_nothing():
    rows = torch.arange(5.0)
    parts = torch.split(rows, (3, 2, 0))
    counted = [numbers.by_share(part.mean(), len(part) / 5) for part in parts]
    assert sum(counted) == rows.mean()
    empty = parts[2].clone().requires_grad_()
    numbers.by_share(empty.mean(), 0.0).backward()
    assert empty.grad is not None


def test_seeds_of_places_lie_apart():
    offsets = [numbers.seed_offset(place) for place in range(4096)]
    assert offsets[0] == 0
    assert len(set(offsets)) == 4096
    assert all(0 <= offset < 2**31 for offset in offsets)

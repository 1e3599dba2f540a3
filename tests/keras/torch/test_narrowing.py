"""A DataLoader from which a process reads its own rows."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.keras.torch.sources import Stream, centered
from unidist.keras.feed.row_sampler import Narrowed, tells_rows


class Slow(Dataset):
    """The first row takes longest."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, k: int) -> float:
        time.sleep(0.0 if k else 0.3)
        return float(k)


class Twice(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2


def read(narrowed: Narrowed) -> list[tuple[list[float], int]]:
    return [(batch.tolist(), total) for batch, total in narrowed]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "in_order": False}], ids=["none", "two"])
def test_batches_come_in_their_order_with_the_rows_that_are_wanted(workers) -> None:
    narrowed = Narrowed(DataLoader(Slow(), 4, **workers), lambda rows: rows[2:], 0)
    # Of no rows one is read, which the reader cuts off.
    assert read(narrowed) == [([2.0, 3.0], 4), ([6.0, 7.0], 4), ([8.0], 2)]
    begun = iter(narrowed)
    assert next(begun)[1] == 4
    assert [total for _, total in narrowed] == [4, 4, 2]
    assert [total for _, total in begun] == [4, 2]


def test_the_order_is_that_of_the_loader() -> None:
    """Whose generator gives a seed to the workers before it shuffles."""

    def loader() -> DataLoader:
        return DataLoader(Slow(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))

    one, other = loader(), loader()
    narrowed = Narrowed(other, lambda rows: rows, 0)
    for _ in range(2):
        assert [batch for batch, _ in read(narrowed)] == [batch.tolist() for batch in one]


def test_what_a_batch_is_made_of_is_told_by_some_loaders_alone() -> None:
    assert tells_rows(DataLoader(Slow(), 4, num_workers=2, pin_memory=False), None)
    for other in (
        DataLoader(Slow(), 4, collate_fn=centered),
        DataLoader(Slow(), batch_size=None),
        DataLoader(Stream(), 4),
        Twice(Slow(), 4),
        [1, 2],
    ):
        assert not tells_rows(other, None)


def test_what_a_loader_is_told_is_told_to_the_one_that_reads() -> None:
    given = {"num_workers": 2, "prefetch_factor": 3, "timeout": 5, "multiprocessing_context": "fork"}
    twin = Narrowed(DataLoader(Slow(), 4, pin_memory=True, **given), lambda rows: rows, 0)._loader
    assert (twin.num_workers, twin.prefetch_factor, twin.timeout, twin.pin_memory) == (2, 3, 5, True)
    assert twin.multiprocessing_context.get_start_method() == "fork"

"""Data that the processes see otherwise, and the errors that they get."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import unidist
from tests.support.nets import plain
from tests.support.runs import fresh


class Shuffled(keras.utils.PyDataset):
    """Orders its rows by a generator of its own."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.order = rng.permutation(64)
        self.x = np.arange(64 * 12, dtype="float32").reshape(64, 12) / 768

    def __len__(self) -> int:
        return 8

    def __getitem__(self, k: int) -> Any:
        rows = self.order[8 * k : 8 * k + 8]
        return self.x[rows], (rows % 4).astype("int32")


def fitted(seed: int | None) -> tuple[str, float]:
    """(the error or nothing, the loss)."""
    fresh()
    with unidist.DataParallel().scope():
        model = plain()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    try:
        history = model.fit(Shuffled(seed), epochs=2, shuffle=False, verbose=0).history
    except unidist.DesyncError as error:
        return str(error), 0.0
    return "", float(history["loss"][-1])


def of_a_loader() -> float:
    """A DataLoader that shuffles by torch's own state, which no process has seeded alike."""
    import torch

    fresh()
    data = Shuffled(3)
    rows = [data[k] for k in range(8)]
    x, y = (torch.as_tensor(np.concatenate(part)) for part in zip(*rows, strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
    with unidist.DataParallel().scope():
        model = plain()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return float(model.fit(loader, epochs=1, verbose=0).history["loss"][-1])

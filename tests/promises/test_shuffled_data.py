"""Data that are shuffled as they are read come in one device's order, also in later epochs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.conftest import Check

pytestmark = pytest.mark.processes
PLACES = [
    *(("torch-2", "dp", 3), ("horovod-2", "dp", 0), ("sim-jax", "2x2", 1), ("jax-2x2", "2x2 across", 0)),
    *(("tensorflow-4", "2x2", 1), ("tensorflow-2x2", "2x2", 0), ("horovod-2-tensorflow", "dp", 0)),
]


def shuffled(kind: str | None, zero: int) -> dict[str, Any]:
    """Arrays, a PyDataset and, on TensorFlow, a tf.data.Dataset. Its batches have other sums in another order."""
    import keras
    import numpy as np

    from tests.support import nets
    from tests.support.runs import told

    x, y = nets.rows(16)

    class Pairs(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, place: int) -> Any:
            return x[4 * place :][:4], y[4 * place :][:4]

    with nets.begun(kind, zero):
        model = nets.crossed(nets.plain(), nets.sgd())
    shuffles = {"shuffle": True}
    sources: list[dict[str, Any]] = [{"x": x, "y": y, "batch_size": 4, **shuffles}, {"x": Pairs(), **shuffles}]
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        # The first: what is read to build the model must not count.
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(16).batch(4)
        sources.insert(0, {"x": dataset, "shuffle": False})
    losses = [model.fit(**source, epochs=3, verbose=0).history["loss"] for source in sources]
    return {"losses": np.ravel(losses), **told(model)}


@pytest.mark.parametrize(("setting", "kind", "zero"), PLACES)
def test_their_order_is_one_devices(setting: str, kind: str, zero: int, as_alone: Check) -> None:
    as_alone(setting, kind, zero, shuffled)

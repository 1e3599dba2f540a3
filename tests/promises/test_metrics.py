"""Metrics are those of all rows, weighted, whatever they keep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.conftest import Check
from tests.promises.places import everywhere

pytestmark = pytest.mark.processes
# Over Horovod they are joined by the same code with torch.
KERAS = {"torch": [()], "jax": [()], "tensorflow": [()], "horovod-2-tensorflow": []}
PLACES = [row[:3] for row in everywhere(KERAS)]


def _largest() -> list[Any]:
    """The largest error so far, and how many batches were seen: no sums of what parts of the rows give; and one whose
    result is its state itself, as Keras's guides write it."""
    import keras
    from keras import ops

    class Largest(keras.metrics.Metric):
        def __init__(self, name: str = "largest", **options: Any) -> None:
            super().__init__(name=name, **options)
            self.top = self.add_weight(name="top", initializer="zeros")
            self.batches = self.add_weight(name="batches", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            errors = ops.abs(ops.cast(y_true, "float32") - y_pred)
            self.top.assign(ops.maximum(self.top, ops.max(errors)))
            self.batches.assign_add(1.0)

        def result(self) -> Any:
            return self.top + self.batches

    class State(Largest):
        def result(self) -> Any:
            return self.top

    # Plain Keras on JAX does not trace a variable as a result.
    return [Largest()] if keras.config.backend() == "jax" else [Largest(), State("state")]


def measured(kind: str | None, zero: int) -> dict[str, Any]:
    import keras
    import numpy as np
    from keras import metrics

    from tests.support import nets

    with nets.begun(kind, zero):
        sums = [metrics.AUC(num_thresholds=20), metrics.Precision(), metrics.Recall(), metrics.BinaryIoU(threshold=0.5)]
        means = [metrics.F1Score(threshold=0.5), metrics.MeanAbsoluteError()]
        top = keras.layers.Dense(1, "sigmoid", name="d")
        model = keras.Sequential([keras.Input((12,)), *nets.plain().layers, top], name="plain")
        model.compile(nets.sgd(momentum=0.9), "binary_crossentropy", metrics=[*sums, *means, *_largest()])
    x, y = nets.rows()
    return nets.fitted(model, x, (y > 1).astype("float32")[:, None], sample_weight=np.linspace(0, 2, len(y)))


@pytest.mark.parametrize(("setting", "kind", "zero"), PLACES)
def test_they_are_one_devices(setting: str, kind: str, zero: int, as_alone: Check) -> None:
    as_alone(setting, kind, zero, measured)

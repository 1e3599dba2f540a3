"""Whatever layers add to a loss, whatever it does with the rows, training is one device's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.conftest import Check
from tests.promises.places import everywhere
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes
MODELS = ["regularized", "covariance", "besides", "lora"]
# Horovod averages gradients behind Keras's own step, whatever they are of.
NAMES = {
    "torch": [*MODELS, "spread"],
    "jax": MODELS,
    "tensorflow": unless_all(["regularized", "covariance", "lora"], MODELS),
    "horovod-2-tensorflow": unless_all(["besides"], MODELS),
}
OWN_RULES: dict[str, dict[str, tuple[str | None, ...]]] = {
    "lora": {".*ids/embeddings": (None, "model")},
    "spread": {".*a/kernel": (None, None, "model"), ".*b/kernel": (None, "model", None)},
}


def _losing(besides: bool) -> type:
    """A model whose loss mixes the rows: no sum of what parts of them lose; by itself, or besides what Keras computes.

    The first adds what its layers lose by itself.
    """
    import keras
    from keras import ops

    from tests.support.nets import CLASSES

    class Covariance(keras.Sequential):
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            centered = y_pred - ops.mean(y_pred, axis=0, keepdims=True)
            covariance = ops.matmul(ops.transpose(centered), centered) / ops.cast(ops.shape(y_pred)[0], "float32")
            mixed = 0.1 * ops.sum(ops.square(covariance))
            if besides:
                return super().compute_loss(x, y, y_pred, sample_weight, training) + mixed
            return ops.mean(ops.square(y_pred - ops.one_hot(y, CLASSES))) + mixed + sum(self.losses)

    return Covariance


def _made(name: str) -> Any:
    import keras

    from tests.support import nets

    if name == "regularized":
        return nets.regularized()
    # Statistics of all rows are computed unasked; Keras takes the question on TensorFlow alone.
    asked = {"synchronized": True} if name == "besides" and keras.config.backend() == "tensorflow" else {}
    if name in ("covariance", "besides"):
        return _losing(name == "besides")(nets.regularized(**asked).layers, name="plain")
    return _low_rank() if name == "lora" else _spread()


def _low_rank() -> Any:
    """Adapters of low rank on frozen, cut kernels."""
    import keras
    from keras import layers

    from tests.support import nets

    inputs = layers.Input((5,), dtype="int32")
    x = layers.GlobalAveragePooling1D(name="pool")(layers.Embedding(16, 12, name="ids")(inputs))
    for one in (layers.Dense(16, "tanh", name="a"), layers.Dense(8, name="b"), layers.Dense(nets.CLASSES, name="c")):
        x = one(x)
    model = keras.Model(inputs, x, name="lora")
    for name in ("ids", "a", "b"):
        model.get_layer(name).enable_lora(4)
    return model


def _spread() -> Any:
    """Biases that are the same along the outputs' cut dim, with a dim there and without one."""
    import keras
    from keras import layers

    from tests.support import nets

    inputs = layers.Input((12,))
    first = layers.EinsumDense("bc,cde->bde", (4, 4), bias_axes="d", activation="tanh", name="a")(inputs)
    second = layers.EinsumDense("bc,cde->bde", (4, 2), bias_axes="e", activation="tanh", name="b")(inputs)
    both = layers.Concatenate(name="both")([layers.Flatten(name="f")(first), layers.Flatten(name="g")(second)])
    return keras.Model(inputs, layers.Dense(nets.CLASSES, name="c")(both), name="spread")


def built(kind: str | None, zero: int, name: str) -> dict[str, Any]:
    import numpy as np

    from tests.support import nets

    rules = OWN_RULES["spread"] if name == "spread" else {**OWN_RULES.get(name, {}), **nets.RULES}
    with nets.begun(kind, zero, rules):
        model = nets.crossed(_made(name), nets.adam())
    x, y = nets.rows()
    return nets.fitted(model, (np.abs(x[:, :5] * 5).astype("int32") % 16) if name == "lora" else x, y)


def _fits(_: str, kind: str, zero: int, name: str) -> bool:
    # What these are for shows where they are cut.
    return {"spread": kind != "dp", "lora": kind != "dp" or zero == 3}.get(name, True)


@pytest.mark.parametrize(("setting", "kind", "zero", "name"), everywhere(NAMES, _fits))
def test_it_trains_as_one_device(setting: str, kind: str, zero: int, name: str, as_alone: Check) -> None:
    for found in as_alone(setting, kind, zero, built, name):
        cut = {path.rpartition("/")[0].rpartition("/")[2] for path in found["sharded"]}
        assert cut >= {"lora": {"ids", "a", "b"}, "spread": {"a", "b"}}.get(name, set())

"""What the processes of test_gpu.py run."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

import unidist
from tests.gpu.device import DEVICE, ON_GPU
from tests.parity.train import Spec
from tests.torch import test_conformance
from tests.torch.accelerators import nowhere_near
from unidist.backends.protocol import Array
from unidist.testing.laws import World

# conformance ----------------------------------------------------------------------------------------------------------


def world() -> World:
    """The laws' world, of tensors on the device."""
    if not ON_GPU:
        nowhere_near()
    made = test_conformance.world(layout_pairs=20)

    def array(value: Array, dtype: str) -> torch.Tensor:
        found: torch.Tensor = made.array(value, dtype)
        return found.to(DEVICE)

    return replace(made, array=array, numpy=lambda x: made.numpy(x.cpu()))


# placement ------------------------------------------------------------------------------------------------------------


def places() -> dict[str, str]:
    """Where a model's variables, its optimizer's, its metrics', its random states' and its predictions are."""
    import keras

    from unidist.keras.patching.compat import get_device

    with unidist.DataParallel(zero=1).scope():
        dropout = keras.layers.Dropout(0.5)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), dropout, keras.layers.Dense(2)])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.ones((8, 6), "float32")
    model.fit(x, x[:, :2], batch_size=4, verbose=0)
    kinds = {
        "weights": model.trainable_variables,
        "slots": model.optimizer.variables,
        "metrics": model.metrics_variables,
        "seeds": [dropout.seed_generator.state],
    }
    found = {name: "/".join(sorted({_place(v) for v in variables})) for name, variables in kinds.items()}
    return {**found, "keras": str(get_device()), "called": str(model(x).device)}


def _place(variable: Any) -> str:
    return "/".join(sorted({str(shard.device) for shard in variable._storage.shards.values()}))


def batches() -> set[str]:
    """Where the batches are that a step is given, and whether their copies were waited for."""
    import keras

    from unidist.keras.torch import devices

    seen: set[str] = set()
    sent = devices.sent

    def noting(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        found = sent(x, device)
        seen.add(found.device.type)
        return found

    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    with mock.patch.object(devices, "sent", noting):
        model.fit(np.ones((8, 6), "float32"), np.ones((8, 2), "float32"), batch_size=4, verbose=0)
    return seen


# training -------------------------------------------------------------------------------------------------------------


def train_in_parts(spec: Spec | None) -> list[float]:
    """The losses of a training under sequence parallelism; None: on one device."""
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    scope: Any = contextlib.nullcontext()
    if spec is not None:
        scope = unidist.ModelParallel(unidist.Mesh(dict(spec.axes)), sequence_parallel=True).scope()
    with scope:
        tokens = keras.Input((8,), dtype="int32")
        x = keras.layers.Embedding(11, 16, name="embed")(tokens)
        for k in range(2):
            attended = keras.layers.MultiHeadAttention(2, 8, name=f"attention_{k}")(x, x)
            x = keras.layers.LayerNormalization(name=f"norm_{k}")(x + attended)
            wide = keras.layers.Dense(32, "gelu", name=f"up_{k}")(x)
            x = keras.layers.LayerNormalization(name=f"last_{k}")(x + keras.layers.Dense(16, name=f"down_{k}")(wide))
        model = keras.Model(tokens, keras.layers.Dense(3, name="head")(x))
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    draw = np.random.default_rng(1)
    x, y = draw.integers(0, 11, (12, 8)), draw.normal(size=(12, 8, 3)).astype("float32")
    found: list[float] = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    return found


def replicas() -> tuple[str, list[float]]:
    """(digest of what both ranks have whole, losses) of a training whose gradients are added up by atomics."""
    import keras

    from tests.keras.torch.drifting import digest
    from unidist.keras.records import model_record
    from unidist.keras.torch.world import RankWorld

    class Lookup(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.table = self.add_weight((3, 16), name="table")

        def call(self, x: torch.Tensor) -> torch.Tensor:
            table = keras.ops.convert_to_tensor(self.table)
            return torch.index_select(table, 0, x.reshape(-1)).reshape(*x.shape, 16)

        def compute_output_shape(self, shape: Any) -> Any:
            return (*shape, 16)

    mesh = unidist.Mesh({"cut": 2})
    rules = unidist.LayoutMap(
        mesh, {".*up/kernel": (None, "cut"), ".*up/bias": ("cut",), ".*down/kernel": ("cut", None)}
    )
    on_gpu = contextlib.nullcontext() if ON_GPU else mock.patch.object(RankWorld, "rounds_alike", False)
    keras.utils.set_random_seed(5)
    draw = np.random.default_rng(1)
    x, y = draw.integers(0, 3, (256, 16)), draw.normal(size=(256, 16, 3)).astype("float32")
    with on_gpu, unidist.ModelParallel(mesh, rules, model_axis="cut").scope():
        inner = [keras.layers.Dense(32, "gelu", name="up"), keras.layers.Dense(16, name="down")]
        model = keras.Sequential([keras.Input((16,), dtype="int32"), Lookup(), *inner, keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        losses: list[float] = model.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0).history["loss"]
        assert model_record.of(model).engine.world.drifting == ("cut",)
    assert any("table" in v.path and v._storage.is_whole for v in model.trainable_variables)
    return digest(model), losses

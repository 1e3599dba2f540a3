"""What the processes of test_loading run: files of one device, and loading them inside a scope, measured."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import unidist
from tests.parity.train import Spec

SIZE = 1024
KERNEL = 4 * SIZE * SIZE
NAMES = ("model.weights.h5", "sharded.weights.json", "model.keras")
RULES = {".*dense[02]/kernel": (None, "model"), ".*dense1/kernel": ("model", None)}
KINDS = ("lora", "int8", "int4", "bfloat16")
Values = dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A model that a process has loaded.

    Attributes:
        values: of its weights.
        largest: items at most that were read at once of what is in a file; 0: no range was.
        peak: bytes of Python's and NumPy's memory at most, while it was loaded a second time.
        local: the shape of what a device holds of the first kernel, before the model was used.
        predict: of some rows.
    """

    values: Values
    largest: int
    peak: int
    local: tuple[int, ...]
    predict: Any


def stack(size: int = SIZE, dtype: str = "float32") -> Any:
    import keras

    layers = keras.layers
    kernels = [layers.Dense(size, dtype=dtype, name=f"dense{k}") for k in range(3)]
    return keras.Sequential([keras.Input((size,)), *kernels])


def values(model: Any) -> Values:
    return {"/".join(v.path.split("/")[-2:]): np.asarray(v) for v in model.weights}


def predicted(model: Any) -> Any:
    x = np.random.default_rng(1).normal(size=(4, model.inputs[0].shape[1])).astype("float32")
    return model.predict(x, verbose=0)


def write(folder: str) -> Values:
    """The files of one device; its weights."""
    import keras

    keras.utils.set_random_seed(3)
    model, place = stack(), Path(folder)
    model.save(place / "model.keras")
    model.save_weights(place / "model.weights.h5")
    model.save_weights(place / "sharded.weights.json", max_shard_size=1.5 * KERNEL / 2**30)
    return values(model)


def distribution(spec: Spec) -> Any:
    mesh = unidist.Mesh(dict(spec.axes))
    if spec.kind == "data":
        return unidist.DataParallel(mesh, zero=spec.zero)
    return unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, RULES))


def _by_file(path: Path) -> Any:
    import keras

    if path.suffix == ".keras":
        return keras.models.load_model(path)
    model = stack()
    tracemalloc.reset_peak()
    model.load_weights(path)
    return model


def _largest_read(path: Path) -> int:
    """Items that are read at once of what is in a file."""
    from unidist.keras.lazy_values import Stored

    sizes = [0]
    original = Stored.part

    def part(self: Any, index: Any) -> Any:
        found = original(self, index)
        sizes.append(found.size)
        return found

    with mock.patch.object(Stored, "part", part):
        _by_file(path)
    return max(sizes)


def _measured(path: Path) -> tuple[Any, int]:
    gc.collect()
    tracemalloc.start()
    try:
        model = _by_file(path)
        return model, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def loaded(name: str, spec: Spec, folder: str) -> Loaded:
    path = Path(folder) / name
    with distribution(spec).scope():
        largest = _largest_read(path)
        model, peak = _measured(path)
        local = _local_shape(model.layers[0].kernel)
        return Loaded(values(model), largest, peak, local, predicted(model))


def _local_shape(variable: Any) -> tuple[int, ...]:
    """Without a look at the whole."""
    import keras

    match keras.config.backend():
        case "torch":
            return tuple(next(iter(variable._storage.shards.values())).shape)
        case "jax":
            return tuple(variable.value.addressable_shards[0].data.shape)
    from tensorflow.experimental import dtensor

    return tuple(dtensor.unpack(variable._value.read_value())[0].shape)


# of other kinds -------------------------------------------------------------------------------------------------------


def write_kind(kind: str, folder: str) -> tuple[Values, Any]:
    """A model of low-rank updates, of integers, or of another dtype; its weights as one device loads them, and what it
    predicts."""
    import warnings

    import keras

    keras.utils.set_random_seed(4)
    model = stack(256, "bfloat16" if kind == "bfloat16" else "float32")
    if kind == "lora":
        for layer in model.layers:
            layer.enable_lora(4)
            layer.lora_kernel_b.assign(keras.random.normal(layer.lora_kernel_b.shape, seed=5))
    elif kind.startswith("int"):
        with warnings.catch_warnings(action="ignore"):  # The input has nothing to quantize.
            model.quantize(kind)
    model.save(Path(folder) / "model.keras")
    if kind == "lora":
        model.save_weights(Path(folder) / "merged.weights.h5")
    one = keras.models.load_model(Path(folder) / "model.keras")
    return values(one), predicted(one)


def loaded_kind(spec: Spec, folder: str) -> tuple[Values, Any, bool]:
    import keras

    with distribution(spec).scope():
        model = keras.models.load_model(Path(folder) / "model.keras")
        cut = _local_shape(model.layers[0]._kernel) != tuple(model.layers[0]._kernel.shape)
        return values(model), predicted(model), cut

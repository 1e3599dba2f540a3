"""What `unidist checkpoint export` writes for Keras, and what it refuses: nothing half, and it says what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import unidist
from unidist.errors import CheckpointError
from unidist.keras.checkpoint.exporting import export
from unidist.keras.patching.compat import serialization_lib


def net(*layers: Any) -> Any:
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="dense")], name="inner")
    kernel = keras.layers.Dense(4096, name="dense")
    return keras.Sequential([keras.Input((4,)), inner, keras.layers.BatchNormalization(), kernel, *layers])


def test_weights_are_those_of_the_model_also_where_no_optimizer_was_saved(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        export(tmp_path, "latest", tmp_path / "model.weights.h5")
    unidist.save(model, tmp_path, step=1)
    export(tmp_path, "latest", tmp_path / "model.weights.h5")
    loaded = net()
    loaded.load_weights(tmp_path / "model.weights.h5")
    for one, other in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=one.path)
    with pytest.raises(CheckpointError, match="is there already"):
        export(tmp_path, 1, tmp_path / "model.weights.h5")
    with pytest.raises(CheckpointError, match=r"end with \.keras or \.weights\.h5"):
        export(tmp_path, 1, tmp_path / "model.h5")


def test_an_optimizer_that_has_taken_no_step_is_exported(tmp_path: Path) -> None:
    model = net()
    model.compile("adam", "mse")
    unidist.save(model, tmp_path, step=1)
    export(tmp_path, 1, tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.weights[-2].numpy(), model.weights[-2].numpy())
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)


class Unknown(keras.Model):  # type: ignore[misc]
    def __init__(self, size: Any) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(size())

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def test_a_model_that_keras_cannot_make_is_refused_with_the_remedy(tmp_path: Path) -> None:
    own = Unknown(lambda: 3)
    own.build((None, 4))
    for step, model in enumerate([own, net(keras.layers.Lambda(lambda x: x))]):
        unidist.save(model, tmp_path, step=step)
        with pytest.raises(CheckpointError, match=r"let unidist\.restore and model\.save write the file"):
            export(tmp_path, step, tmp_path / "model.keras")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_damage_leaves_no_file(tmp_path: Path) -> None:
    folder = unidist.save(net(), tmp_path, step=1)
    path = next(folder.glob("model-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-(1 << 16)] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="do not have their checksum"):
        export(tmp_path, 1, tmp_path / "model.keras")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_tensorflow_is_not_imported_for_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras asks whether it is there by importing it."""
    asked: list[str] = []

    class Asked:
        def __getattr__(self, name: str) -> bool:
            asked.append(name)
            return False

    monkeypatch.setattr(serialization_lib, "tf", Asked())
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    unidist.save(net(), tmp_path, step=1)
    export(tmp_path, 1, tmp_path / "model.keras")
    assert not asked
    net().save(tmp_path / "other.keras")
    assert "available" in asked

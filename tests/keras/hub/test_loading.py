"""Folders of presets, keras_hub's and Hugging Face's, are loaded in place and bit for bit."""

from __future__ import annotations

from pathlib import Path

import keras_hub
import numpy as np
import pytest

import unidist
from unidist.keras.lazy_values import Stored

SIZES = {"num_layers": 1, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 128, "intermediate_dim": 256}


# What Keras says of what a Functional model holds twice, on one device too.
@pytest.mark.filterwarnings("ignore:Skipping nested container")
@pytest.mark.parametrize("way", ["keras_hub", "transformers"])
def test_a_preset_is_read_in_parts(way, tmp_path, monkeypatch):
    wanted = keras_hub.models.Llama3Backbone(vocabulary_size=256, tie_word_embeddings=way == "transformers", **SIZES)
    if way == "keras_hub":
        wanted.save_to_preset(tmp_path)
    else:
        wanted.export_to_transformers(str(tmp_path))
    rules = {"token_embedding/embeddings": ("model", None), ".*(gate|intermediate)_dense/kernel": (None, "model")}
    reads, original = [], Stored.part

    def part(self, index):
        assert "model.safetensors" not in Path("/proc/self/maps").read_text()
        reads.append((value := original(self, index)).shape)
        return value

    monkeypatch.setattr(Stored, "part", part)
    with unidist.ModelParallel(None, unidist.LayoutMap(unidist.Mesh({"model": 4}), rules)).scope():
        model = keras_hub.models.Llama3Backbone.from_preset(str(tmp_path))
    assert reads.count((64, 128)) == 4
    assert reads.count((128, 64)) == 8
    for one, other in zip(model.weights, wanted.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=one.path)

"""What layers keep beside their variables is saved and restored: vocabularies, bins, files and arrays of one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import preloaded
from tests.parity.train import Spec
from tests.parity.worlds import ALONE, DATA_2, DATA_4, Alone, Worlds
from tests.visible import WITH_TENSORFLOW
from unidist.checkpoint.reading import Reader

pytestmark = pytest.mark.processes


def test_what_adapt_has_learned_comes_along_and_into_keras_files(alone: Alone, tmp_path: Path) -> None:
    """Also where Keras has counted names on, and steps are compiled with other words."""
    (found,) = alone.world("tensorflow").call("tests.parity.keeping:learned", str(tmp_path))
    assert np.abs(found["saved"] - found["before"]).max() > 1e-2
    np.testing.assert_allclose(found["after"], found["saved"], atol=1e-6)
    np.testing.assert_allclose(found["loaded"], found["saved"], atol=1e-6)
    assert (found["told"], found["code"]) == (((), ()), 0)
    assert found["words"] == ["", "[UNK]", "b", "c", "a"]


def test_a_training_goes_on_with_the_words_that_it_had(alone: Alone, tmp_path: Path) -> None:
    first, second = alone.world("tensorflow").call("tests.parity.keeping:going_on", str(tmp_path))[0]
    np.testing.assert_allclose(second, first, atol=1e-6)


@pytest.mark.parametrize(
    ("setting", "spec", "way"),
    [
        ("torch-2", replace(DATA_2, zero=3), "folder"),
        ("torch-2", replace(DATA_2, zero=3), "asynchronous"),
        ("jax-2x2", replace(DATA_4, zero=3), "folder"),
        ("jax-2x2", replace(DATA_4, zero=3), "store"),
        ("tensorflow-2x2", DATA_4, "folder"),
    ],
)
def test_process_0_says_what_all_have(setting: str, spec: Spec, way: str, worlds: Worlds, tmp_path: Path) -> None:
    folder = f"file://{tmp_path}/run" if way == "store" else str(tmp_path / "run")
    world = worlds.get(setting)
    for found in world.call("tests.parity.keeping:by_processes", folder, spec, asynchronous=way == "asynchronous"):
        assert found == ("of 0", 0.5, False, True)
    with Reader(folder, verify="all") as reader:
        kept = {name for name, tensor in reader.tensors.items() if tensor.kind == "asset"}
        assert kept == {f"noting//{name}" for name in ("assets/in/text", "assets/empty", "own/number")}
        assert reader.read("noting//assets/in/text").tobytes() == b"of 0"
        assert reader.written_by("noting//assets/in/text") == {0: 4}


def test_lookups_and_tokenizers_beside_a_model_on_torch(tmp_path: Path) -> None:
    setting = replace(
        ALONE["torch"], environment=tuple(WITH_TENSORFLOW.items()), preload=preloaded.TORCH_AND_TENSORFLOW
    )
    with setting.world() as world:
        (found,) = world.call("tests.parity.keeping:texts", str(tmp_path))
    assert found["lookup"][0] == found["lookup"][1] == ["[UNK]", "c", "b", "a"]
    assert found["pieces"][0] == found["pieces"][1] == ["[PAD]", "[UNK]", "a", "b", "c"]
    assert found["ids"] == [1, 3]

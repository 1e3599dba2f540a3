"""Every writer of Keras and keras_hub beside the savers of models, called by all processes of a world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np

import unidist
from tests.keras.hub import zoo
from unidist import session
from unidist.keras.consistency.processes import SavingFailedError
from unidist.keras.patching.compat import saving_lib
from unidist.testing.processes import ProcessWorld

WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]


def made() -> Any:
    """A backbone with low-rank kernels, some of whose values are cut over two devices."""
    mesh, rules = (
        unidist.Mesh({"model": 2}),
        {".*token_embedding/embeddings": (None, "model"), ".*_kernel_a": ("model",)},
    )
    keras.utils.set_random_seed(5)
    with unidist.ModelParallel(None, unidist.LayoutMap(mesh, rules, strict=False)).scope():
        backbone = zoo.BACKBONES["gpt2"]()
        backbone.enable_lora(2, ["query", "value"])
    return backbone


def writers(backbone: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    hub, of_bert = keras_hub, keras_hub.models.BertTokenizer(vocabulary=WORDS)
    preprocessor = hub.models.BertTextClassifierPreprocessor(of_bert, sequence_length=4)
    space = keras.utils.FeatureSpace({"x": "float"})
    formats = {"torch": ("torch", "model.pt2"), "jax": ("tf_saved_model", "model")}
    kind, name = formats[keras.config.backend()]
    return {
        "x.lora.h5": lambda: backbone.save_lora_weights(folder / "x.lora.h5"),
        "backbone": lambda: backbone.save_to_preset(str(folder / "backbone")),
        "task": lambda: hub.models.GPT2CausalLM(backbone, preprocessor=None).save_to_preset(str(folder / "task")),
        "tokenizer": lambda: of_bert.save_to_preset(str(folder / "tokenizer")),
        "preprocessor": lambda: preprocessor.save_to_preset(str(folder / "preprocessor")),
        "converter": lambda: hub.layers.ImageConverter((8, 8)).save_to_preset(str(folder / "converter")),
        "transformers": lambda: backbone.export_to_transformers(str(folder / "transformers")),
        "space.keras": lambda: space.save(str(folder / "space.keras")),
        "edited.weights.h5": lambda: edit(backbone, folder),
        name: lambda: trained().export(str(folder / name), format=kind, verbose=False),
    }


def trained() -> Any:
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.train_on_batch(np.ones((4, 4)), np.ones((4, 2)))
    return model


def edit(backbone: Any, folder: Path) -> None:
    """One file is read by all."""
    source = folder.parent / "source.weights.h5"
    backbone.save_weights(source)
    keras.saving.KerasFileEditor(str(source)).save(str(folder / "edited.weights.h5"))


def write(shared: str) -> list[tuple[str, list[str]]]:
    """Of each writer: its name, and the files in the folders of this process and the first when it returned.

    Each process names a folder of its own, so that whoever writes is seen.
    """
    place = int(session.backend().process_index())
    folder = Path(shared) / str(place)
    folder.mkdir()
    backbone, found = made(), []
    assert unidist.describe(backbone).sharded
    for name, call in writers(backbone, folder).items():
        call()
        # The first process may be at the next one already.
        of_it = [p for p in (folder, folder.parent / "0") for p in (p / name, *(p / name).rglob("*")) if p.is_file()]
        found.append((name, sorted({str(p.relative_to(shared)) for p in of_it})))
    assert_is_written(backbone, folder.parent / "0")
    return found


def assert_is_written(backbone: Any, folder: Path) -> None:
    """What the first process wrote has the values of the model, and all read it."""
    other = keras_hub.models.Backbone.from_preset(str(folder / "backbone"))
    weights = {variable.path: variable for variable in backbone.weights}
    for variable in other.weights:
        np.testing.assert_array_equal(np.asarray(variable), np.asarray(weights[variable.path]), err_msg=variable.path)
    store = saving_lib.H5IOStore(folder / "x.lora.h5", mode="r")
    layers = [layer for layer in backbone._flatten_layers(include_self=False) if layer.weights]
    assert backbone._lora_enabled_layers
    for index in backbone._lora_enabled_layers:
        kernel = store.get(f"lora/{index}")["lora_kernel_a"]
        np.testing.assert_array_equal(kernel, np.asarray(layers[index].lora_kernel_a))
    store.close()


def fail(shared: str) -> list[str]:
    """The first process's disk is full in the middle of a preset; afterwards all can go on."""
    is_first = session.backend().process_index() == 0
    backbone, left = made(), [3]
    original = saving_lib.H5IOStore.__setitem__

    def set_item(self: Any, key: str, value: Any) -> None:
        left[0] -= 1
        if is_first and left[0] < 0:
            raise OSError("no space is left")
        original(self, key, value)

    saving_lib.H5IOStore.__setitem__ = set_item
    try:
        backbone.save_to_preset(str(Path(shared) / "full"))
    except (OSError, SavingFailedError) as error:
        failure = f"{type(error).__name__}: {error}"
    finally:
        saving_lib.H5IOStore.__setitem__ = original
    backbone.save_to_preset(str(Path(shared) / "again"))
    return [failure, str((Path(shared) / "again" / "model.weights.h5").exists())]


# for the tests --------------------------------------------------------------------------------------------------------


def check_writing(world: ProcessWorld, folder: Path) -> None:
    """The first of two processes writes, and both go on when the file is there."""
    first, second = world.call(write, str(folder))
    for (name, files), (_, seen_by_other) in zip(first, second, strict=True):
        assert files, name
        assert all(path.startswith(f"0/{name}") for path in files)
        assert seen_by_other == files


def check_failing(world: ProcessWorld, folder: Path) -> None:
    """A writer that fails tells the others."""
    first, second = world.call(fail, str(folder))
    assert first == ["OSError: no space is left", "True"]
    assert second == ["SavingFailedError: process 0 could not save for all: OSError: no space is left", "True"]

"""Writers of Keras and keras_hub beside the savers of models: one process writes, all wait for it."""

from __future__ import annotations

import functools
import inspect
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from unidist import session
from unidist.keras import driver as drivers
from unidist.keras import saving
from unidist.keras.patching.patches import Hook, calling, no_model
from unidist.keras.records import model_record


@dataclass(frozen=True)
class Writer:
    """A method or function that writes files.

    Attributes:
        place: its name in Keras's or keras_hub's public modules.
        path: the argument that says where; nothing is written where it is None.
        reads: whether it reads the values of a model, which is its first argument.
    """

    place: str
    path: str
    reads: bool = False


OF_KERAS = (
    Writer("Model.export", "filepath", reads=True),
    Writer("export.ExportArchive.write_out", "filepath"),
    Writer("saving.KerasFileEditor.save", "filepath"),
    Writer("utils.FeatureSpace.save", "filepath"),
    Writer("utils.plot_model", "to_file"),
)
OF_HUB = (
    Writer("models.Backbone.save_lora_weights", "filepath", reads=True),
    Writer("models.Backbone.save_to_preset", "preset_dir", reads=True),
    Writer("models.Task.save_to_preset", "preset_dir", reads=True),
    Writer("models.Preprocessor.save_to_preset", "preset_dir"),
    Writer("tokenizers.Tokenizer.save_to_preset", "preset_dir"),
    Writer("layers.AudioConverter.save_to_preset", "preset_dir"),
    Writer("layers.ImageConverter.save_to_preset", "preset_dir"),
    Writer("layers.VideoConverter.save_to_preset", "preset_dir"),
    Writer("models.Backbone.export_to_transformers", "path", reads=True),
    Writer("models.CausalLM.export_to_transformers", "path", reads=True),
    Writer("models.CausalLMPreprocessor.export_to_transformers", "path"),
    Writer("tokenizers.Tokenizer.export_to_transformers", "path"),
    Writer("tokenizers.compute_word_piece_vocabulary", "vocabulary_output_file"),
    Writer("tokenizers.compute_sentence_piece_proto", "proto_output_file"),
    Writer("upload_preset", "preset"),
)


def hooks() -> Iterator[Hook]:
    """Keras's writers."""
    yield from _hooks(keras, OF_KERAS)
    # On JAX Orbax's own processes write together.
    if keras.config.backend() != "jax" and hasattr(keras.callbacks, "OrbaxCheckpoint"):
        yield Hook(
            keras.callbacks.OrbaxCheckpoint, "_save_checkpoint", _by_orbax, "process 0 writes for all", needed=no_model
        )


def hooks_of_hub() -> Iterator[Hook]:
    """keras_hub's writers. keras_hub must be imported."""
    return _hooks(sys.modules["keras_hub"], OF_HUB)


def has_hub() -> bool:
    """Returns whether keras_hub is imported, as a whole."""
    return hasattr(sys.modules.get("keras_hub"), "upload_preset")


def _hooks(package: Any, writers: tuple[Writer, ...]) -> Iterator[Hook]:
    for one in writers:
        *owners, name = one.place.split(".")
        owner = functools.reduce(lambda found, inner: getattr(found, inner, None), owners, package)
        # One that this version does not have writes nothing.
        if hasattr(owner, name):
            making = functools.partial(_by_one, writer=one)
            yield Hook(
                owner, name, making, "process 0 writes for all", imported=inspect.ismodule(owner), needed=no_model
            )


def _by_one(original: Any, writer: Writer) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        driver = drivers.current()
        if driver is None or saving.is_writing() or not model_record.has_distributed():
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        place = given.arguments[writer.path]
        if place is None:
            return original(*args, **kwargs)

        def read_along() -> None:
            # Whatever reads a model's values is run as it is, into files that are thrown away.
            with tempfile.TemporaryDirectory() as folder:
                given.arguments[writer.path] = str(Path(folder) / Path(place).name)
                original(*given.args, **given.kwargs)

        model = args[0] if writer.reads else None
        return driver.writing(model, lambda: original(*args, **kwargs), read_along)

    return write


@calling
def _by_orbax(original: Any, self: Any, step: Any, logs: Any = None) -> Any:
    """Makes process 0 write at once, of several.

    Orbax writes while training goes on, which the others would not wait for.
    """
    driver, model = drivers.current(), self.model
    if driver is None or session.backend().process_count() < 2 or not model_record.has_distributed():
        return original(self, step, logs)

    def write() -> Any:
        before, self.save_on_background = self.save_on_background, False
        try:
            return original(self, step, logs)
        finally:
            self.save_on_background = before

    return driver.writing(model, write, lambda: model.get_state_tree(value_format="numpy_array"))

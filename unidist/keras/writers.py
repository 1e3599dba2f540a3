"""Makes one of several processes write files and show progress: process 0, and all wait for it.

Writers are those of Keras and keras_hub beside the savers of models, and callbacks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
from keras.callbacks import BackupAndRestore, CSVLogger, RemoteMonitor, TensorBoard

from unidist import session
from unidist.keras import driver as drivers
from unidist.keras import saving
from unidist.keras.consistency.processes import Processes
from unidist.keras.patching.compat import tree
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


def silence(given: inspect.BoundArguments) -> None:
    """Makes an entrance of Keras's trainer show no progress."""
    if "verbose" in given.signature.parameters:
        given.arguments["verbose"] = 0


@contextlib.contextmanager
def by_one(given: inspect.BoundArguments, processes: Processes | None) -> Iterator[None]:
    """Silences the other processes inside: they show nothing and their callbacks write nowhere.

    They take part where all must.

    Callbacks that save through the model (ModelCheckpoint) need nothing: the savers have one writer.

    Args:
        given: the arguments of an entrance of Keras's trainer; changed here.
        processes: None where this process is the only one.
    """
    if processes is None:
        yield
        return
    if not processes.is_first:
        silence(given)
    with contextlib.ExitStack() as stack:
        for callback in tree.flatten(given.arguments.get("callbacks")):
            if isinstance(callback, BackupAndRestore):
                _share_backup(callback, processes, stack)
            elif processes.is_first:
                continue
            elif isinstance(callback, CSVLogger):
                _set(callback, "filename", os.devnull, stack)
            elif isinstance(callback, TensorBoard):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                _set(callback, "log_dir", folder, stack)
            elif isinstance(callback, RemoteMonitor):
                _set(callback, "on_epoch_end", lambda epoch, logs=None: None, stack)
        yield


def _share_backup(callback: Any, processes: Processes, stack: contextlib.ExitStack) -> None:
    """Lets process 0 keep the backup.

    All learn when it is gone, since the next training looks for one at its start.
    """
    ending = callback.on_train_end

    def on_train_end(logs: Any = None) -> None:
        with processes.saving():
            if processes.is_first:
                ending(logs)

    def save() -> None:
        callback.model.save_weights(callback._weights_path, overwrite=True)

    _set(callback, "on_train_end", on_train_end, stack)
    if not processes.is_first:
        _set(callback, "_save_model", save, stack)


def _set(owner: Any, name: str, value: Any, stack: contextlib.ExitStack) -> None:
    before = vars(owner).get(name, owner)
    setattr(owner, name, value)
    stack.callback(_put_back, owner, name, before)


def _put_back(owner: Any, name: str, before: Any) -> None:
    # The owner itself stands for "had none of its own".
    if before is owner:
        delattr(owner, name)
    else:
        setattr(owner, name, before)

"""One of several processes writes files and shows progress: process 0."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from keras.callbacks import BackupAndRestore, CSVLogger, RemoteMonitor, TensorBoard

from unidist.keras.consistency.processes import Processes
from unidist.keras.patching.compat import tree


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
    """Sets an attribute until the stack is left."""
    before = vars(owner).get(name, owner)
    setattr(owner, name, value)
    stack.callback(_put_back, owner, name, before)


def _put_back(owner: Any, name: str, before: Any) -> None:
    # The owner itself stands for "had none of its own".
    if before is owner:
        delattr(owner, name)
    else:
        setattr(owner, name, before)

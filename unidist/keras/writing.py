"""One of several processes writes files and shows progress: process 0."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from keras.callbacks import BackupAndRestore, CSVLogger, TensorBoard

from unidist.errors import UnidistError
from unidist.keras.compat import tree


class SavingFailedError(UnidistError, OSError):
    """Process 0, which writes for all, could not save."""


class LoadingFailedError(UnidistError, OSError):
    """Another process could not load what all of them were to load."""


@dataclass(frozen=True)
class Crew:
    """Several processes, of which one writes.

    Attributes:
        is_first: whether this is the one.
        share: the first process's text, on every process. A collective of the world.
    """

    is_first: bool
    share: Callable[[str], str]

    @contextlib.contextmanager
    def told_to_all(self) -> Iterator[None]:
        """Waits for process 0, and lets the others fail if it does."""
        failure = ""
        try:
            yield
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            told = self.share(failure)
        if told:
            raise SavingFailedError(f"process 0 could not save for all: {told}")


def silence(given: inspect.BoundArguments) -> None:
    """Makes an entrance of Keras's trainer show no progress."""
    if "verbose" in given.signature.parameters:
        given.arguments["verbose"] = 0


@contextlib.contextmanager
def by_one(given: inspect.BoundArguments, crew: Crew | None) -> Iterator[None]:
    """While this is entered the other processes show nothing, and their callbacks write nowhere and take part where all
    must.

    Callbacks that save through the model (ModelCheckpoint) need nothing: the savers have one writer.

    Args:
        given: the arguments of an entrance of Keras's trainer; changed here. crew: None where this process is the only
            one.
    """
    if crew is None:
        yield
        return
    if not crew.is_first:
        silence(given)
    with contextlib.ExitStack() as stack:
        for callback in tree.flatten(given.arguments.get("callbacks")):
            if isinstance(callback, BackupAndRestore):
                _share_backup(callback, crew, stack)
            elif crew.is_first:
                continue
            elif isinstance(callback, CSVLogger):
                _set(callback, "filename", os.devnull, stack)
            elif isinstance(callback, TensorBoard):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                _set(callback, "log_dir", folder, stack)
        yield


def _share_backup(callback: Any, crew: Crew, stack: contextlib.ExitStack) -> None:
    """Process 0 keeps the backup; all learn when it is gone, since the next training looks for one at its start."""
    ending = callback.on_train_end

    def on_train_end(logs: Any = None) -> None:
        with crew.told_to_all():
            if crew.is_first:
                ending(logs)

    def save() -> None:
        callback.model.save_weights(callback._weights_path, overwrite=True)

    _set(callback, "on_train_end", on_train_end, stack)
    if not crew.is_first:
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

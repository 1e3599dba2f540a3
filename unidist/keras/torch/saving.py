"""Saves under any strategy: full values once, written by one process; all help to gather them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unidist.keras import saving as keras_saving
from unidist.keras.consistency.processes import Processes
from unidist.keras.patching.compat import legacy_h5_format, saving_lib, torch_convert_to_numpy
from unidist.keras.patching.patches import Hook, calling
from unidist.keras.records import model_record
from unidist.keras.strategies import distribution as distributions
from unidist.keras.torch import data
from unidist.keras.torch.params import collective_traversal, placing


class _Discard(saving_lib.H5IOStore):  # type: ignore[misc]
    """A weights store that reads every value, as the writer's does, and keeps none."""

    def __init__(self) -> None:
        self.path_or_io, self.mode, self.archive = None, "w", None

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> _Discard:
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        # As the writer's does: a value may be computed, with a gradient, or of a dtype that NumPy has not.
        torch_convert_to_numpy(value)

    def __len__(self) -> int:
        return 0

    def keys(self) -> Any:
        return ()

    def close(self) -> None:
        """Nothing is open."""


def hooks() -> Iterator[Hook]:
    """saving_lib and the legacy HDF5 format: models that are not placed are saved as before."""
    why = "process 0 writes what all hold"
    yield Hook(saving_lib, "save_model", calling(_save_model), why)
    yield Hook(saving_lib, "save_weights_only", calling(_save_weights_only), why)
    yield Hook(legacy_h5_format, "save_model_to_hdf5", calling(_save_model_to_hdf5), why)
    yield from keras_saving.hooks_of_loading(_processes)


def _processes(model: Any) -> Processes | None:
    from unidist.keras.torch.engine import world_of_model

    world = None if model is None else world_of_model(model)
    if world is None:
        distribution = distributions.current()
        world = None if distribution is None else placing.world_of(distribution)
    return None if world is None else data.processes(world)


def _settle(model: Any) -> None:
    found = model_record.of(model).engine
    if found is not None:
        found.settle()


def _save_model(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    _save(
        model,
        lambda: original(model, filepath, *args, **kwargs),
        lambda: saving_lib._save_state(model, _Discard(), None, "", set()),
    )


def _save_weights_only(
    original: Any, model: Any, filepath: Any, max_shard_size: Any = None, objects_to_skip: Any = None
) -> Any:
    _save(
        model,
        lambda: original(model, filepath, max_shard_size, objects_to_skip),
        lambda: saving_lib._save_state(model, _Discard(), None, "", {id(o) for o in objects_to_skip or ()}),
    )


def _save_model_to_hdf5(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    def read_along() -> None:
        # The legacy format has no store to replace: the others write into a file that is thrown away.
        with tempfile.TemporaryDirectory() as folder:
            original(model, os.fspath(Path(folder) / "discarded.h5"), *args, **kwargs)

    _save(model, lambda: original(model, filepath, *args, **kwargs), read_along)


def _save(model: Any, write: Callable[[], Any], read_along: Callable[[], Any]) -> Any:
    """Lets process 0 write and the others read along: each whole value is a collective.

    Returns when the file is there.

    Args:
        write: saves the model.
        read_along: reads what `write` does, in the same order, and keeps nothing.

    Raises:
        SavingFailedError: on the other processes, where process 0 could not write.
    """
    from unidist.keras.torch.engine import world_of_model

    _settle(model)
    world = world_of_model(model)
    if world is not None and world.is_virtual:
        # What ranks that do not write would fail at in real processes fails here too.
        read_along()
    return _by_first(_processes(model), write, read_along)


def writing(model: Any, write: Callable[[], Any], read_along: Callable[[], Any]) -> Any:
    """Does what `_save` does, for a writer of any kind.

    Args:
        model: None: no values are read, and the others only wait.
    """
    if model is None:
        several = data.processes(placing.world_of(distributions.adopt(model_record.latest())))
        return _by_first(several, write, lambda: None)
    _settle(model)
    return _by_first(_processes(model), write, read_along)


def _by_first(several: Processes | None, write: Callable[[], Any], read_along: Callable[[], Any]) -> Any:
    if several is None:
        return write()
    if keras_saving.is_writing():
        return write() if several.is_first and not collective_traversal.is_again() else read_along()
    with several.saving(), keras_saving.writing():
        if not several.is_first:
            read_along()
            return None
        with collective_traversal.walking():
            try:
                return write()
            except BaseException:
                # The others are in the middle of their reading: it goes on to its end.
                with collective_traversal.going_on():
                    read_along()
                raise

"""Files of models are whole or not there: they are written beside their place, and then moved to it.

A full disk, an error in a layer or a lost process leaves the file that was there before. Source of the method: the
atomic replacement of files by rename(2), with fsync(2) before it, as in POSIX.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unidist.flight.recorder import recorder
from unidist.keras.patching.compat import file_utils, legacy_h5_format, saving_lib
from unidist.keras.patching.patches import Hook, calling

# Of the longest first: Keras recognises formats by them.
_SUFFIXES = (".weights.h5", ".keras", ".h5", ".hdf5")


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """Gives a path beside `place`; what was written there replaces it at the end, unless an error comes.

    Raises:
        OSError: the file could not be written or moved.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "notes.h5"
        >>> with replacing(place) as beside:
        ...     _ = beside.write_text("all of it")
        ...     place.exists()
        False
        >>> place.read_text()
        'all of it'
    """
    suffix = next((s for s in _SUFFIXES if place.name.endswith(s)), place.suffix)
    # One name for each file: what a killed process has left is written over by the next one.
    beside = place.with_name(f"{place.name.removesuffix(suffix)}.unfinished{suffix}")
    try:
        yield beside
        _to_the_disk(beside)
        os.replace(beside, place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened
        _to_the_disk(place.parent)


def _to_the_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


WRITERS = ((saving_lib, "save_model"), (saving_lib, "save_weights_only"), (legacy_h5_format, "save_model_to_hdf5"))


def hooks() -> tuple[Hook, ...]:
    """Hooks into Keras's three writers of models.

    Folders, remote paths and weights in several files are written as Keras writes them.
    """
    why = "a file is whole or not there, and its writing is a phase of the process"
    return tuple(Hook(owner, name, _whole_or_not, why) for owner, name in WRITERS)


@calling
def _whole_or_not(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    place = _one_local_file(filepath)
    with recorder.phase("saving"), contextlib.ExitStack() as stack:
        if place is None or kwargs.get("overwrite") is False or _in_several_files(original.__name__, args, kwargs):
            return original(model, filepath, *args, **kwargs)
        return original(model, str(stack.enter_context(replacing(place))), *args, **kwargs)


def _one_local_file(filepath: Any) -> Path | None:
    if not isinstance(filepath, (str, os.PathLike)):
        return None
    text = os.fspath(filepath)
    is_file = isinstance(text, str) and not file_utils.is_remote_path(text) and text.endswith(_SUFFIXES)
    place = Path(text) if is_file else None
    return place if place is not None and place.parent.is_dir() and not place.is_dir() else None


def _in_several_files(name: str, args: Any, kwargs: Any) -> bool:
    return name == "save_weights_only" and (args[0] if args else kwargs.get("max_shard_size")) is not None

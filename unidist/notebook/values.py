"""Carries values between a notebook and its processes: JSON, and NumPy's own files.

Nothing is pickled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from unidist.launch.request import LaunchError

_PLAIN = "numbers, strings, None, lists, tuples, dicts and NumPy arrays"
_TREE = "tree.json"


def write(value: Any, folder: Path, what: str) -> None:
    """Writes a value into a folder that is made for it, which its user alone can read.

    Args:
        what: how an error names the value.

    Raises:
        LaunchError: something in it is none of numbers, strings, None, lists, tuples, dicts and NumPy arrays.
    """
    folder.mkdir(mode=0o700)
    arrays: list[Any] = []
    tree = _packed(value, arrays, what, ())
    for number, array in enumerate(arrays):
        with _private(folder / f"{number}.npy") as file:
            np.save(file, array, allow_pickle=False)
    # Last, and at once: where it is, all is.
    written = folder / "tree.part"
    with _private(written) as file:
        file.write(json.dumps(tree).encode())
    written.rename(folder / _TREE)


def has(folder: Path) -> bool:
    """Returns whether a value was written there, whole."""
    return (folder / _TREE).is_file()


def read(folder: Path) -> Any:
    """Reads what `write` wrote."""
    return _unpacked(json.loads((folder / _TREE).read_text()), folder)


def is_plain(value: Any) -> bool:
    """Returns whether a value can be written."""
    try:
        _packed(value, [], "", ())
    except LaunchError:
        return False
    return True


def _private(path: Path) -> Any:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _packed(value: Any, arrays: list[Any], what: str, around: tuple[int, ...]) -> Any:
    """Returns the value as JSON has it.

    What JSON has no word for is a list: ["tuple", ...], ["dict", ...], ["array", n].
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if id(value) in around:
        raise LaunchError(f"{what} contains itself: give {_PLAIN}")
    inside = (*around, id(value))
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_packed(one, arrays, what, inside) for one in value)]
    if type(value) is dict:
        members = ((_packed(k, arrays, what, inside), _packed(v, arrays, what, inside)) for k, v in value.items())
        return ["dict", *([key, member] for key, member in members)]
    # A dtype of kind V is none of NumPy's own, and comes back as bytes.
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.dtype.kind != "V":
        arrays.append(np.asarray(value))
        return ["array" if isinstance(value, np.ndarray) else "number", len(arrays) - 1]
    raise LaunchError(f"{what} is or has a {type(value).__name__}: only {_PLAIN} go between a notebook and processes")


def _unpacked(tree: Any, folder: Path) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *members = tree
    if kind in ("array", "number"):
        array = np.load(folder / f"{int(members[0])}.npy", allow_pickle=False)
        return array if kind == "array" else array[()]
    if kind == "dict":
        return {_unpacked(key, folder): _unpacked(value, folder) for key, value in members}
    found = [_unpacked(one, folder) for one in members]
    return tuple(found) if kind == "tuple" else found

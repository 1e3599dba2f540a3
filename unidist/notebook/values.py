"""Carries values between a notebook and its processes: JSON beside arrays, in one file of NumPy's.

Nothing is pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from unidist.launch.request import LaunchError

_PLAIN = "numbers, strings, None, lists, tuples, dicts and NumPy arrays"


def write(value: Any, file: Path, what: str) -> None:
    """Writes a value into a new file, which its user alone can read.

    Args:
        what: how an error names the value.

    Raises:
        LaunchError: something in it is none of numbers, strings, None, lists, tuples, dicts and NumPy arrays.
    """
    arrays: list[Any] = []
    tree = json.dumps(_packed(value, arrays, what, ()))
    # Where the file is, all of it is.
    written = file.with_suffix(".part")
    with private(written) as opened:
        np.savez(opened, *arrays, tree=np.frombuffer(tree.encode(), np.uint8))
    written.rename(file)


def private(path: Path) -> IO[bytes]:
    """Opens a new file, which its user alone can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def read(file: Path) -> Any:
    """Reads what `write` wrote."""
    with np.load(file, allow_pickle=False) as held:
        return _unpacked(json.loads(held["tree"].tobytes()), held)


def is_plain(value: Any) -> bool:
    """Returns whether a value can be written."""
    try:
        _packed(value, [], "", ())
    except LaunchError:
        return False
    return True


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


def _unpacked(tree: Any, arrays: Mapping[str, Any]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *members = tree
    if kind in ("array", "number"):
        array = arrays[f"arr_{members[0]}"]
        return array if kind == "array" else array[()]
    if kind == "dict":
        return {_unpacked(key, arrays): _unpacked(value, arrays) for key, value in members}
    found = [_unpacked(one, arrays) for one in members]
    return tuple(found) if kind == "tuple" else found

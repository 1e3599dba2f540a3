"""The steps of a directory of checkpoints: which count, which is the latest, and removing old ones.

A step is a folder `step-00000012` with a manifest in it, which is written last. Beside such folders there may be, after
a crash or while somebody writes:

- `step-00000012.tmp`: is being written, or was left so. Does not count.
- `step-00000012.replaced`: the one of before, while a new one of the same step takes its place. Counts as long as there
  is no `step-00000012`.
- `step-00000012.removed`: is being removed. Does not count.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from unidist.checkpoint import disk
from unidist.checkpoint.manifest import MANIFEST
from unidist.errors import CheckpointError

TMP, REPLACED, REMOVED = ".tmp", ".replaced", ".removed"
LAST_STEP = 10**12 - 1
Step = int | Literal["latest"]
_NAME = re.compile(r"step-(\d{8,12})(\.tmp|\.replaced|\.removed)?")


def steps(directory: str | Path) -> list[int]:
    """The steps that count, in order; none where there is no directory."""
    return sorted({step for step, suffix in _found(Path(directory)) if _counts(Path(directory), step, suffix)})


def latest(directory: str | Path) -> int | None:
    """The last step that counts."""
    return max(steps(directory), default=None)


def step_folder(directory: str | Path, step: int) -> Path:
    """The folder of a step that counts.

    Raises:
        CheckpointError: there is none.
    """
    for suffix in ("", REPLACED):
        if _counts(Path(directory), step, suffix):
            return folder_of(Path(directory), step, suffix)
    raise missing(directory, step, steps(directory))


def missing(directory: str | Path, step: int, there: Sequence[int]) -> CheckpointError:
    """The error of a step that is not among those of a directory."""
    known = ", ".join(map(str, there[-5:])) or "none"
    return CheckpointError(f"{directory} has no checkpoint of step {step}; the last ones: {known}", file=str(directory))


def find(directory: str | Path, step: Step) -> Path:
    """The folder of a step of a directory; "latest" of a step's own folder is this folder.

    Raises:
        CheckpointError: there is none.
    """
    if step != "latest":
        return step_folder(directory, step)
    if _is_committed(Path(directory)):
        return Path(directory)
    last = latest(directory)
    if last is None:
        raise CheckpointError(f"{directory} has no checkpoint", file=str(directory))
    return step_folder(directory, last)


def prune(directory: str | Path, keep: int, newest: int) -> list[int]:
    """Removes steps before `newest` so that `keep` are left with it; and what crashes left.

    Args:
        directory: of the checkpoints.
        keep: how many, at least 1.
        newest: the step that was written now. Later ones, of a training that went on from an earlier step, stay.

    Returns:
        The steps that were removed.
    """
    where = Path(directory)
    old = outdated(steps(where), keep, newest)
    for step, suffix in _found(where):
        is_left = suffix in (TMP, REMOVED) and step < newest
        is_wanted = step not in old and not is_left and not (suffix == REPLACED and _counts(where, step, ""))
        # What is half removed may have gone with the folder before it in the list.
        if not is_wanted and folder_of(where, step, suffix).exists():
            remove(where, step, suffix)
    return old


def outdated(there: Sequence[int], keep: int, newest: int) -> list[int]:
    """Returns the steps of a directory that go, all before `newest`, so that `keep` are left with it.

    Raises:
        CheckpointError: none would be left.
    """
    if keep < 1:
        raise CheckpointError(f"keep must be 1 or more, got {keep}")
    older = [step for step in there if step < newest]
    return older[: max(0, len(older) - (keep - 1))]


def remove(directory: Path, step: int, suffix: str) -> None:
    """Removes a folder. It gets another name first: half of it must not count."""
    folder, away = folder_of(directory, step, suffix), folder_of(directory, step, REMOVED)
    with disk.told(folder):
        if suffix != REMOVED:
            if away.exists():
                shutil.rmtree(away)
            folder.rename(away)
            disk.sync_folder(directory)
        shutil.rmtree(away)


def folder_of(directory: Path, step: int, suffix: str = "") -> Path:
    """The folder's name, whether there is one or not."""
    if type(step) is not int or not 0 <= step <= LAST_STEP:
        raise CheckpointError(f"a step is a number from 0 to {LAST_STEP}, got {step!r}")
    return directory / f"step-{step:08d}{suffix}"


def named(folder: Path) -> tuple[int, str] | None:
    """(step, suffix) of a folder's name; None where it has another."""
    found = _NAME.fullmatch(folder.name)
    if found is None:
        return None
    step, suffix = int(found[1]), found[2] or ""
    return (step, suffix) if folder_of(Path(), step, suffix).name == folder.name else None


def _found(directory: Path) -> list[tuple[int, str]]:
    """(step, suffix) of each folder of a step."""
    if not directory.exists():
        return []
    with disk.told(directory):
        names = sorted(os.listdir(directory))
    return [found for name in names if (found := named(Path(name))) is not None]


def _counts(directory: Path, step: int, suffix: str) -> bool:
    if suffix not in ("", REPLACED):
        return False
    return _is_committed(folder_of(directory, step, suffix))


def _is_committed(folder: Path) -> bool:
    """A folder itself, not a link to one, with a manifest."""
    try:
        return stat.S_ISDIR(folder.lstat().st_mode) and stat.S_ISREG((folder / MANIFEST).lstat().st_mode)
    except OSError:
        return False

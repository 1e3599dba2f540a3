"""Waits until all parts of a step stand; then process 0 commits it.

Who cannot write its part says so in the step's folder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from unidist.checkpoint import disk
from unidist.checkpoint.writing import part_of
from unidist.errors import CheckpointError

# Seconds between two looks.
_LOOK = 0.05
_MOST_WORDS = 4096


def tell_the_first(folder: Path, place: int, words: str) -> None:
    """Process 0 waits for this one's part. On a full disk a file without words may still be made."""
    if place and not (folder / part_of(place)).exists():
        with contextlib.suppress(OSError):
            (folder / f"failed-{place}").write_text(words[:_MOST_WORDS])


def until_all_wrote(folder: Path, places: int, timeout: float) -> Iterator[None]:
    """Goes on until each process's part stands.

    Raises:
        CheckpointError: one could not write its part, or did not in time.
    """
    until = time.monotonic() + timeout
    left = set(range(places))
    while True:
        for place in sorted(left):
            if (failed := folder / f"failed-{place}").exists():
                with disk.told(failed), failed.open(errors="replace") as file:
                    words = file.read(_MOST_WORDS) or "it could not say why"
                raise CheckpointError(f"process {place} could not write its part: {words}", file=str(failed))
            if (folder / part_of(place)).exists():
                left.discard(place)
        if not left:
            return
        if time.monotonic() > until:
            missing = ", ".join(map(str, sorted(left)[:10]))
            text = f"processes did not write their parts within {timeout:g} s: {missing}"
            raise CheckpointError(f"{folder}: {text}", file=str(folder))
        yield
        time.sleep(_LOOK)

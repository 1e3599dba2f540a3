"""A training's timeline, from the lines that `unidist.Telemetry` wrote: data that is not trusted."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidist.drawing.canvas import MARGIN, Canvas, Picture
from unidist.errors import DrawingError

_FILES = re.compile(r"rank-(\d{1,9})\.jsonl")
# Lines of a rank become so many bars; several lines share one by their medians.
MOST_BARS = 120
MOST_RANKS = 16
_LONGEST_LINE = 1 << 20
_HIGH, _LEFT, _RIGHT = 84, 250, 980


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of a record: seconds of a step, and those in which the process waited in collectives.

    The latter is None where the record has it not.
    """

    step: int
    seconds: float
    exposed: float | None


def read_telemetry(directory: str | os.PathLike[str]) -> dict[int, list[Measured]]:
    """Returns rank -> its lines, of a directory of `unidist.Telemetry`.

    A last line that is still being written is left out.

    Raises:
        DrawingError: there is no such directory, it has no record, or a line is none of Telemetry's.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise DrawingError(f"{os.fspath(directory)!r} is no directory: give the one that unidist.Telemetry writes to")
    files = {int(m[1]): path for path in folder.iterdir() if (m := _FILES.fullmatch(path.name)) and path.is_file()}
    if not files:
        raise DrawingError(
            f"{os.fspath(directory)!r} has no rank-N.jsonl: give the directory that unidist.Telemetry writes to"
        )
    found = {rank: _read(files[rank]) for rank in sorted(files)}
    if not any(found.values()):
        raise DrawingError(f"{os.fspath(directory)!r}: no step has been written yet")
    return found


def _read(file: Path) -> list[Measured]:
    out = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        number = 0
        while line := lines.readline(_LONGEST_LINE):
            number += 1
            if not line.endswith("\n"):
                if len(line) >= _LONGEST_LINE:
                    raise DrawingError(
                        f"{file}, line {number}: longer than {_LONGEST_LINE} characters, not Telemetry's"
                    )
                break
            if (found := _measured(line, f"{file}, line {number}")) is not None:
                out.append(found)
    return out


def _measured(line: str, where: str) -> Measured | None:
    try:
        told: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DrawingError(f"{where}: no JSON, so not Telemetry's: {type(error).__name__}") from None
    if isinstance(told, dict) and "epoch_logs" in told:
        return None
    values: Any = told if isinstance(told, dict) else {}
    step, seconds, exposed = (values.get(key) for key in ("step", "seconds", "exposed_seconds"))
    if type(step) is not int or not _is_time(seconds) or not (exposed is None or _is_time(exposed)):
        raise DrawingError(f"{where}: not a line of unidist.Telemetry, which has step, seconds and exposed_seconds")
    return Measured(step, float(seconds), None if exposed is None else min(float(exposed), float(seconds)))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9


def picture_of_telemetry(ranks: dict[int, list[Measured]], title: str | None) -> Picture:
    """Draws each rank's steps as bars: computing below, waiting in collectives above.

    The first line stands apart: it compiles, and would hide the others.
    """
    canvas = Canvas(title or "Seconds of a step, by rank")
    kept = dict(list(ranks.items())[:MOST_RANKS])
    warm = {rank: _warm(lines) for rank, lines in kept.items()}
    most = max((line.seconds for lines in warm.values() for line in lines), default=0.0) or 1.0
    known = {line.exposed is not None for lines in warm.values() for line in lines}
    split = [("c0", "computing and all else"), ("c1", "exposed: waiting in collectives")]
    unsplit = [("gr", "a step whose waiting the record does not have")]
    canvas.legend([*(split if True in known else ()), *(unsplit if False in known else ())], 52, hatched=("c1",))
    y, said = 92.0, []
    for rank, lines in kept.items():
        said.append(_rank(canvas, rank, lines, warm[rank], y, most))
        y += _HIGH + 34
    if len(ranks) > len(kept):
        canvas.text(MARGIN, y, f"and {len(ranks) - len(kept)} ranks more, which are not drawn", kind="m")
    return canvas.picture("; ".join(said))


def _warm(lines: Sequence[Measured]) -> list[Measured]:
    rest = list(lines[1:] if len(lines) > 1 else lines)
    share = -(-len(rest) // MOST_BARS) if rest else 1
    return [_median(rest[k : k + share]) for k in range(0, len(rest), share)]


def _median(lines: Sequence[Measured]) -> Measured:
    exposed = [line.exposed for line in lines if line.exposed is not None]
    seconds = statistics.median(line.seconds for line in lines)
    split = min(seconds, statistics.median(exposed)) if len(exposed) == len(lines) else None
    return Measured(lines[-1].step, seconds, split)


def _rank(canvas: Canvas, rank: int, lines: list[Measured], warm: list[Measured], y: float, most: float) -> str:
    whole = _median(warm) if warm else None
    canvas.text(MARGIN, y + 16, f"rank {rank}", bold=True)
    if whole is None:
        canvas.text(MARGIN, y + 35, "no step written yet", size=12, kind="m", room=_LEFT - 80)
        return f"rank {rank}: no step written yet"
    canvas.text(MARGIN, y + 35, f"median {time_text(whole.seconds)} a step", size=12, room=_LEFT - 85)
    if whole.exposed is None:
        missing = sum(line.exposed is None for line in lines)
        words = "exposed: not recorded" if missing == len(lines) else f"exposed: not in {missing} of {len(lines)} lines"
    else:
        words = f"{time_text(whole.exposed)} exposed, {whole.exposed / (whole.seconds or 1):.0%}"
    canvas.text(MARGIN, y + 53, words, size=12, kind="m", room=_LEFT - 85)
    if len(lines) > 1:
        canvas.text(MARGIN, y + 71, f"first line: {time_text(lines[0].seconds)}", size=12, kind="m", room=_LEFT - 85)
    canvas.text(_LEFT - 8, y + 12, time_text(most), size=11, kind="m", anchor="end", room=70)
    canvas.text(_LEFT - 8, y + _HIGH, "0", size=11, kind="m", anchor="end")
    canvas.rect(_LEFT, y, _RIGHT - _LEFT, _HIGH, "pn", edge=False)
    wide = (_RIGHT - _LEFT) / len(warm)
    for k, line in enumerate(warm):
        _bar(canvas, line, _LEFT + k * wide, min(wide, 60), y, most)
    canvas.line([(_LEFT, y + _HIGH), (_RIGHT, y + _HIGH)])
    canvas.text(_LEFT, y + _HIGH + 15, f"step {warm[0].step}", size=11, kind="m")
    canvas.text(_RIGHT, y + _HIGH + 15, f"step {warm[-1].step}", size=11, kind="m", anchor="end")
    return f"rank {rank}: {time_text(whole.seconds)} a step, {words}"


def _bar(canvas: Canvas, line: Measured, x: float, wide: float, y: float, most: float) -> None:
    gap = 1.5 if wide > 4 else 0.2
    high = _HIGH * line.seconds / most
    waits = _HIGH * (line.exposed or 0) / most
    words = f"step {line.step}: {time_text(line.seconds)}"
    words += "" if line.exposed is None else f", {time_text(line.exposed)} exposed"
    fill = "gr" if line.exposed is None else "c0"
    canvas.rect(x, y + _HIGH - high + waits, wide - gap, high - waits, fill, title=words, edge=False)
    if waits:
        canvas.rect(x, y + _HIGH - high, wide - gap, waits, "c1", title=words, edge=False, hatched=True)


def time_text(seconds: float) -> str:
    """Seconds for people: "1.25 s", "48 ms", "0.3 ms".

    Example:
        >>> time_text(1.25), time_text(0.048), time_text(0.0003)
        ('1.25 s', '48 ms', '0.3 ms')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"

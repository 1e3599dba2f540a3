"""Pictures of what `unidist.Telemetry` wrote: true lengths, what is not recorded is said, and nothing is trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.drawing.svg import rects, said, texts
from unidist import DrawingError, draw


def write(folder: Path, rank: int, steps: list[tuple[float, float | None]], end: str = "") -> None:
    lines = [
        json.dumps({"step": k + 1, "epoch": 0, "time": 0.0, "seconds": s, "exposed_seconds": e, "logs": {}})
        for k, (s, e) in enumerate(steps)
    ]
    lines.append(json.dumps({"step": len(steps), "epoch": 0, "time": 0.0, "epoch_logs": {"loss": 1.0}}))
    (folder / f"rank-{rank}.jsonl").write_text("\n".join(lines) + "\n" + end)


def test_bars_have_the_heights_of_their_seconds(tmp_path: Path) -> None:
    write(tmp_path, 0, [(9.0, 1.0), (0.4, 0.1), (0.8, 0.6)])
    bars = rects(draw(tmp_path).svg)
    computing, waiting = ([bar for bar in bars if bar.kind == kind] for kind in ("c0", "c1"))
    assert [bar.h / waiting[0].h for bar in (*computing, *waiting)] == pytest.approx([3, 2, 1, 6], rel=0.01)
    for low, high in zip(computing, waiting, strict=True):
        assert low.y == pytest.approx(high.y + high.h, abs=0.02)
    words = texts(draw(tmp_path).svg)
    # The first line compiles: it is shown apart, and would hide the others.
    assert "first line: 9 s" in words
    assert "median 600 ms a step" in words
    assert "350 ms exposed, 58%" in words


def test_ranks_follow_each_other_by_number(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write(tmp_path, rank, [(1.0, 0.5)] * 3)
    assert [text for text in texts(draw(str(tmp_path)).svg) if text.startswith("rank ")] == [
        "rank 0",
        "rank 2",
        "rank 10",
    ]


def test_what_the_record_does_not_have_is_said(tmp_path: Path) -> None:
    write(tmp_path, 0, [(1.0, None)] * 4)
    write(tmp_path, 1, [(1.0, 0.2), (1.0, 0.2), (1.0, None), (1.0, 0.2)])
    svg = draw(tmp_path).svg
    assert "exposed: not recorded" in texts(svg)
    assert "exposed: not in 1 of 4 lines" in texts(svg)
    assert "a step whose waiting the record does not have" in said(svg)
    assert [bar.kind for bar in rects(svg)].count("gr") == 4


def test_many_steps_share_bars(tmp_path: Path) -> None:
    write(tmp_path, 0, [(1.0, 0.25)] * 1001)
    assert len(rects(draw(tmp_path).svg)) == 2 * 112
    for rank in range(1, 20):
        write(tmp_path, rank, [(1.0, 0.25)] * 2)
    assert "and 4 ranks more" in said(draw(tmp_path).svg)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 0, [(1.0, 0.5)] * 3, end='{"step": 4, "sec')
    assert "step 3" in texts(draw(tmp_path).svg)


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1, 2]",
        "[" * 100_000,
        '{"step": 1, "seconds": "1"}',
        '{"step": 1, "seconds": -1}',
        '{"step": 1, "seconds": NaN}',
        '{"step": 1, "seconds": 1e400}',
        '{"step": true, "seconds": 1}',
        '{"step": 1, "seconds": 1, "exposed_seconds": "<b>"}',
    ],
    ids=lambda line: line[:30],
)
def test_a_line_of_something_else_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    write(tmp_path, 0, [(1.0, 0.5)])
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DrawingError, match=r"rank-0\.jsonl, line 3: .*Telemetry"):
        draw(tmp_path)


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text("x" * (1 << 21))
    with pytest.raises(DrawingError, match=r"longer than 1048576 characters"):
        draw(tmp_path)


def test_other_directories_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DrawingError, match=r"is no directory: give the one that unidist.Telemetry writes to"):
        draw(str(tmp_path / "missing"))
    with pytest.raises(DrawingError, match=r"has no rank-N\.jsonl"):
        draw(tmp_path)
    write(tmp_path, 0, [])
    with pytest.raises(DrawingError, match="no step has been written yet"):
        draw(tmp_path)

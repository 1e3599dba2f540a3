"""Shows objects in notebooks, and a plan's report as one HTML file that needs nothing else.

Packages below this one ask for it by its name, as they are asked (names.py).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from unidist.drawing.bars import label_of, memory_of, picture_of_ledger, picture_of_memory
from unidist.drawing.canvas import plain
from unidist.drawing.entry import draw, picture_of_plan
from unidist.errors import DrawingError
from unidist.ledger import Ledger
from unidist.planner.plan import Plan

_ROOT = "unidist-page"
# More rows than these make a notebook slow; `show()` prints them all.
_NOTEBOOK_ROWS = 200
# In a notebook the ground is the notebook's, so its colours are taken. A class twice weighs more than its own rules for
# tables, which would put all text to the right.
_IN = f".{_ROOT}.{_ROOT}"
_TABLES = (
    f"{_IN} table{{border-collapse:collapse;font-size:13px;margin:8px 0}}"
    f"{_IN} caption{{text-align:left;font-weight:bold;padding:6px 0}}"
    f"{_IN} th,{_IN} td{{text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid #8884;vertical-align:top}}"
    f"{_IN} td:first-child{{overflow-wrap:anywhere;min-width:200px}}"
    f"{_IN} td:nth-child(2),{_IN} td:nth-child(3){{white-space:nowrap}}"
    f"{_IN} .n{{text-align:right;white-space:nowrap}}"
)
_PAGE = (
    "body{margin:0;background:#fff;color:#1b1f24;font-family:Helvetica,Arial,'Liberation Sans',sans-serif}"
    f".{_ROOT}{{max-width:1000px;margin:0 auto;padding:12px 20px}}"
    "h1{font-size:24px}h2{font-size:18px;margin-top:32px}svg{display:block;margin:8px 0}"
    ".wide{overflow-x:auto}"
    "@media (prefers-color-scheme:dark){body{background:#0d1117;color:#eef2f6}}"
)
# Nothing is loaded and nothing runs, whatever names are in the plan.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Row = Sequence[str]


def table(title: str, head: Row, body: Sequence[Row], numbers: Container[int] = ()) -> str:
    """A table as HTML; every cell is escaped.

    Example:
        >>> table("t", ("what",), [("<b>",)])
        '<table><caption>t</caption><tr><th>what</th></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """

    def row(cells: Row, kind: str) -> str:
        starts = (f'<{kind} class="n">' if k in numbers else f"<{kind}>" for k in range(len(cells)))
        made = (f"{start}{plain(cell)}</{kind}>" for start, cell in zip(starts, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    rows = "".join(row(cells, "td") for cells in body)
    return f"<table><caption>{plain(title)}</caption>{row(head, 'th')}{rows}</table>"


def _fragment(*parts: str) -> str:
    return f'<div class="{_ROOT}"><style>{_TABLES}</style>{"".join(parts)}</div>'


def svg(what: Any) -> str | None:
    """Returns the picture that a notebook shows of an object.

    None where it has none, as a mesh of too many devices: the notebook prints it then.
    """
    try:
        return draw(what).svg
    except DrawingError:
        return None


def html(what: Any) -> str | None:
    """The object's picture and tables; None as above."""
    if (picture := svg(what)) is None:
        return None
    if isinstance(what, Plan):
        return _fragment(picture, _totals(what), _traffic(what), _variables(what, _NOTEBOOK_ROWS))
    if isinstance(what, Ledger):
        title, numbers = "What was sent", (3, 4)
        head: Row = ("collective", "axes", "for", "count", "bytes per rank")
        body: list[Row] = [(op, axes, why, f"{n:,}", f"{b:,}") for op, axes, why, n, b in what.rows()]
    else:
        title, (head, body, numbers) = "Variables", what.table()
    if (more := len(body) - _NOTEBOOK_ROWS) > 0:
        body = [*body[:_NOTEBOOK_ROWS], (f"and {more:,} rows more: print shows all", *[""] * (len(head) - 1))]
    return _fragment(picture, table(title, head, body, numbers))


def report(plan: Plan) -> str:
    """Returns a plan's report: one HTML file with its graph, bars and tables. It loads and runs nothing."""
    title = f"{plan.name} on {label_of(plan)}"
    parts = (
        f"<h1>{plain(title)}</h1>",
        "<h2>Layers</h2>",
        picture_of_plan(plan).svg,
        "<h2>Memory of a device</h2>",
        picture_of_memory([(label_of(plan), memory_of(plan))], None, None).svg,
        _totals(plan),
        "<h2>What a training step sends</h2>",
        picture_of_ledger(plan.predicted, None).svg,
        _traffic(plan),
        f'<div class="wide">{_variables(plan, len(plan.rows))}</div>',
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{plain(title)}</title><style>{_PAGE}</style></head><body>{_fragment(*parts)}</body></html>\n"
    )


def _totals(plan: Plan) -> str:
    return table("Bytes of the device that holds most", ("what", "bytes"), plan.totals(), (1,))


def _traffic(plan: Plan) -> str:
    head = ("collective", "axes", "count", "bytes per device")
    return table("Collectives of a training step", head, plan.traffic(), (2, 3))


def _variables(plan: Plan, most: int) -> str:
    head = ("variable", "shape", "layout", "bytes per device", "why")
    rows = [(r.path, str(r.shape), r.layout.in_words, f"{r.bytes_per_device:,}", r.reason) for r in plan.rows[:most]]
    if len(plan.rows) > most:
        rows.append((f"and {len(plan.rows) - most:,} variables more: print(plan) shows all", "", "", "", ""))
    return table("Variables", head, rows, (3,))

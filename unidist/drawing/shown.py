"""Shows objects of packages below this one in notebooks: they ask for it by name, as they are asked."""

from __future__ import annotations

from typing import Any

from unidist.drawing import page
from unidist.drawing.entry import draw
from unidist.errors import DrawingError
from unidist.ledger import Ledger
from unidist.planner.plan import Plan


def svg(what: Any) -> str | None:
    """Returns the object's picture.

    None where it has none, as a mesh of too many devices: the notebook prints it then.
    """
    try:
        return draw(what).svg
    except DrawingError:
        return None


def html(what: Any) -> str | None:
    """The object's picture and tables; None as above."""
    try:
        if isinstance(what, Plan):
            return page.of_plan(what)
        if isinstance(what, Ledger):
            head = ("collective", "axes", "for", "count", "bytes per rank")
            body = [(op, axes, why, f"{n:,}", f"{b:,}") for op, axes, why, n, b in what.rows()]
            return page.of_rows(what, "What was sent", head, body, frozenset({3, 4}))
        head, body, numbers = what.table()
        return page.of_rows(what, "Variables", head, body, frozenset(numbers))
    except DrawingError:
        return None

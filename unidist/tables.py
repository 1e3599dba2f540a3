"""Tables as text, drawn by rich: the same on a terminal, in a pipe and in a file."""

from __future__ import annotations

import io
from collections.abc import Container, Sequence

# Wider than any row: nothing is folded where nobody says how wide a table may be.
_ENDLESS = 1 << 16


def table(
    rows: Sequence[Sequence[str]], numbers: Container[int] = (), *, title: str = "", width: int = _ENDLESS
) -> str:
    """Rows of cells, in columns as wide as their widest cell.

    Args:
        rows: of one length; the first is the head.
        numbers: the columns whose cells end in one line, and do not begin in one.
        title: stands above the head, which a line then parts from the others.
        width: longer lines are folded.

    Example:
        >>> print(table([("what", "bytes"), ("a kernel", "96")], numbers=(1,)))
        what      bytes
        a kernel     96
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    head, *body = rows
    console = Console(
        file=io.StringIO(), width=width, force_terminal=False, color_system=None, markup=False, emoji=False
    )
    drawn = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD if title else None, pad_edge=False)
    if not title:
        drawn.padding = (0, 2, 0, 0)
    for k, name in enumerate(head):
        drawn.add_column(name, justify="right" if k in numbers else "left", overflow="fold")
    for row in body:
        drawn.add_row(*row)
    with console.capture() as capture:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())

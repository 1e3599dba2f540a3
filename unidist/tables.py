"""Tables as text: the same on a terminal, in a pipe and in a file."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> str:
    """Rows of cells, in columns as wide as their widest cell; quick for tens of thousands of rows.

    Args:
        rows: of one length; the first may be a head.
        numbers: the columns whose cells end in one line, and do not begin in one.

    Example:
        >>> print(table([("what", "bytes"), ("a kernel", "96")], numbers=(1,)))
        what      bytes
        a kernel     96
    """
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if k in numbers else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def titled(title: str, rows: Sequence[Sequence[str]], numbers: Container[int], width: int) -> str:
    """Rows below their title and a head, which is the first of them; cells are folded into the width.

    Names in the first column stay whole where they leave the others half of it.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    head, *body = rows
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    is_short = max(len(row[0]) for row in rows) <= width // 2
    for k, name in enumerate(head):
        is_whole = is_short and k == 0
        drawn.add_column(name, justify="right" if k in numbers else "left", overflow="fold", no_wrap=is_whole)
    for row in body:
        drawn.add_row(*row)
    console = Console(width=width, force_terminal=False, color_system=None, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(title, highlight=False, soft_wrap=True)
        console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())

"""Tables as text."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> str:
    """Rows of cells, in columns as wide as their widest cell.

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

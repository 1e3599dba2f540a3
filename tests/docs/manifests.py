"""Reading the part of YAML that a page's manifest uses: mappings, lists, folded text, words and numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# How far a line is indented, and what it says.
_Line = tuple[int, str]
_KEY = re.compile(r"[\w.-]+:( |$)")
_FOLDED = ">-"


def read(text: str) -> list[Any]:
    """The documents of a manifest.

    Raises:
        AssertionError: a line is of no kind that is known here.
    """
    return [_block([(len(x) - len(x.lstrip()), x.strip()) for x in part.splitlines()]) for part in text.split("---\n")]


def _block(lines: list[_Line]) -> Any:
    (indent, first), *below = lines
    if first == _FOLDED:
        return " ".join(line for _, line in below)
    if first.startswith("- "):
        return [_block([(indent + 2, line[2:]), *rest]) for (_, line), *rest in _groups(lines)]
    if _KEY.match(first):
        return dict(map(_entry, _groups(lines)))
    assert not below, lines
    return _word(first)


def _groups(lines: list[_Line]) -> Iterator[list[_Line]]:
    """Each line that is indented as the first, with those below it that are indented more."""
    starts = [k for k, (indent, _) in enumerate(lines) if indent == lines[0][0]]
    assert all(indent >= lines[0][0] for indent, _ in lines), lines
    yield from (lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=True))


def _entry(group: list[_Line]) -> tuple[str, Any]:
    (indent, first), *below = group
    assert _KEY.match(first), first
    key, _, rest = first.partition(":")
    return key, _block([(indent, rest.strip()), *below] if rest else below)


def _word(text: str) -> Any:
    if text.startswith(("[", '"')) or text in ("true", "false") or text.isdigit():
        return json.loads(text)
    assert re.fullmatch(r"[\w./:-]+", text), text
    return text

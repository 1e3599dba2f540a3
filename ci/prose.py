"""What the documents' prose has to keep to be easy to read: short paragraphs, short sentences, plain words.

`problems` reads one Markdown page. Code does not count: fences, indented blocks; a span of code is one word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHARACTERS = 600
WORDS = 40
# What is written instead: "reported", "is laid out", "and".
AVOIDED = re.compile(r"\b(told|lies|of which)\b", re.IGNORECASE)

_FENCE = re.compile(r"^ *(```|~~~)")
_ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) +")
_INLINE = ((re.compile(r"`[^`]*`"), "Code"), (re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)"), r"\1"))
_END = re.compile(r"[.!?][)\"*_]*\s+(?=[\"*_(]*[A-Z0-9])")


@dataclass(frozen=True)
class Paragraph:
    """A run of prose: a paragraph, an item of a list, a cell of a table."""

    line: int
    text: str

    @property
    def plain(self) -> str:
        """Without links' targets, and with one word for each span of code."""
        text = self.text
        for pattern, instead in _INLINE:
            text = pattern.sub(instead, text)
        return text

    @property
    def sentences(self) -> list[str]:
        return _END.split(self.plain)


def paragraphs(text: str) -> Iterator[Paragraph]:
    lines: list[str] = []
    begun, in_fence = 0, False

    def ended() -> Iterator[Paragraph]:
        if lines:
            yield Paragraph(begun, " ".join(line.strip() for line in lines))
            lines.clear()

    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            in_fence = not in_fence
        is_code = in_fence or _FENCE.match(line) or (line.startswith("    ") and not lines)
        if is_code or not line.strip() or line.startswith(("#", "|", "<", "%", ":::")) or _ITEM.match(line):
            yield from ended()
        if is_code or not line.strip() or line.startswith(("#", "<", "%", ":::")):
            continue
        if line.startswith("|"):
            yield from (Paragraph(number, cell.strip()) for cell in line.strip("|").split(" | "))
        else:
            begun = begun if lines else number
            lines.append(_ITEM.sub("", line))
    yield from ended()


def problems(page: Path) -> list[str]:
    """What a reader would stumble over: one line each, with the page's name and the line's number."""
    found = []
    for paragraph in paragraphs(page.read_text()):
        where = f"{page.name}:{paragraph.line}"
        if len(paragraph.text) > CHARACTERS:
            found.append(f"{where}: a paragraph of {len(paragraph.text)} characters, over {CHARACTERS}")
        for sentence in paragraph.sentences:
            if (count := len(sentence.split())) > WORDS:
                found.append(f"{where}: a sentence of {count} words, over {WORDS}: {sentence[:60]}...")
        found += [f"{where}: {word!r} is a word that we avoid" for word in AVOIDED.findall(paragraph.plain)]
    return found


def documents(root: Path) -> list[Path]:
    """The pages that people write: README and those of docs, without what ci/docs.py makes there."""
    made = {root / "docs" / "_build", root / "docs" / "api"}
    return [root / "README.md", *sorted(p for p in (root / "docs").rglob("*.md") if not made.intersection(p.parents))]

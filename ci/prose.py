"""Looks whether the documents' prose is easy to read: short paragraphs, short sentences, plain words.

`problems` reads one Markdown page. Code does not count: fences, indented blocks; a span of code is one word. `avoided`
looks at the words alone: in the changes, and in what the package itself says, as its errors and its docstrings do.
`openings` looks how the docstrings of a module begin.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHARACTERS = 600
WORDS = 25
FIRST_LINE = 100
# What is written instead: "reported", "is laid out", "and".
AVOIDED = re.compile(r"\b(told|tells|lies|of which)\b", re.IGNORECASE)
# In a docstring a name may be one of them: an argument, a function.
_AVOIDED_IN_CODE = re.compile(r"\b(told(?![:(])|tells|lies)\b", re.IGNORECASE)
# A docstring that begins so has no verb: it is a part of a sentence.
_NO_SENTENCE = re.compile(r"(What|Those|Of|That|Whether|Where|Who|Which|How|When)\b")

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
    for line, length in items(page.read_text()):
        if length > CHARACTERS:
            found.append(f"{page.name}:{line}: an item of a list of {length} characters, over {CHARACTERS}")
    return found


def items(text: str) -> Iterator[tuple[int, int]]:
    """(line, characters) of each item of a list, with all its paragraphs; an item inside of another is one itself."""
    begun, length, in_fence = 0, 0, False
    for number, line in enumerate([*text.splitlines(), "end"], 1):
        is_fence = bool(_FENCE.match(line))
        in_fence = in_fence != is_fence
        if in_fence or is_fence or not line.strip():
            continue
        starts = bool(_ITEM.match(line))
        if begun and (starts or not line.startswith("  ")):
            yield begun, length
            begun = 0
        if starts:
            begun, length = number, 0
        length += len(line.strip())


def avoided(file: Path) -> list[str]:
    """The words that we avoid, in a page or in what a module says: its docstrings, and its strings of several words."""
    if file.suffix != ".py":
        found = [(p.line, word) for p in paragraphs(file.read_text()) for word in AVOIDED.findall(p.plain)]
    else:
        found = []
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                plain = _INLINE[0][0].sub("Code", node.value)
                found += [(node.lineno, word) for word in _AVOIDED_IN_CODE.findall(plain)]
    return [f"{file.name}:{line}: {word!r} is a word that we avoid" for line, word in found]


def openings(file: Path) -> list[str]:
    """Returns which docstrings of a module begin without a sentence, or with too long a line."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (text := ast.get_docstring(node)) is None:
            continue
        first, begun = text.partition("\n")[0], _NO_SENTENCE.match(text)
        where = f"{file}:{node.body[0].lineno}"
        if begun:
            found.append(f"{where}: {begun[1]!r} begins a docstring: begin with a verb, or with who does it")
        if len(first) > FIRST_LINE:
            found.append(f"{where}: a docstring's first line has {len(first)} characters, over {FIRST_LINE}")
    return found


def of_words_alone(root: Path) -> list[Path]:
    """What is looked at for its words alone: the changes, and the package."""
    return [root / "CHANGELOG.md", *sorted((root / "unidist").rglob("*.py"))]


def documents(root: Path) -> list[Path]:
    """The pages that people write: README and those of docs, without what ci/docs.py makes there."""
    made = {root / "docs" / "_build", root / "docs" / "api"}
    return [root / "README.md", *sorted(p for p in (root / "docs").rglob("*.md") if not made.intersection(p.parents))]

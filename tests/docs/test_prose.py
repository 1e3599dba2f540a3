"""Paragraphs and sentences of the documents are short, and their words plain; and what looks at them sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.prose import avoided, documents, of_words_alone, problems
from tests.docs.documents import ROOT


@pytest.mark.parametrize("page", documents(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_easy_to_read(page: Path) -> None:
    assert problems(page) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a " * 301, "a paragraph of 601 characters"),
        ("- first\n- " + "a " * 301, "page.md:2: a paragraph"),
        ("Short. A " + "word " * 40 + "end.", "a sentence of 42 words"),
        ("| a | b |\n|---|---|\n| " + "word " * 41 + "| b |", "page.md:3: a sentence of 41 words"),
        ("It is `told` and [told](told.md).", "'told' is a word"),
        ("first\nOf which more.", "page.md:1: 'Of which' is a word"),
        ("- first\n- " + "Yes. " * 80 + "\n\n  " + "No. " * 80, "page.md:2: an item of a list of 720 characters"),
    ],
)
def test_what_is_hard_to_read_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    (found, *_) = problems(tmp_path / "page.md")
    assert said in found


@pytest.mark.parametrize(
    "text",
    [
        "```python\n# told " + "word " * 50 + "\n```\n",
        "    told " + "word " * 50,
        "One `told`. `told` of [this](told.md). " + "Short here. " * 30,
        "# " + "word " * 45,
    ],
)
def test_code_and_short_sentences_are_fine(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    assert problems(tmp_path / "page.md") == []


def test_the_changes_and_the_package_say_it_in_plain_words() -> None:
    assert [problem for file in of_words_alone(ROOT) for problem in avoided(file)] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f():\n    raise ValueError(f'{x} lies elsewhere')\n", ["code.py:2: 'lies' is a word that we avoid"]),
        ('"""What is told."""\n', ["code.py:1: 'told' is a word that we avoid"]),
        ("told = {'told': lies('`told` by')}\n", []),
        ('"""Args:\n    told: all.\n\n    >>> told(1)\n"""', []),
    ],
)
def test_words_of_code_are_found_where_it_speaks(text: str, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(text)
    assert avoided(tmp_path / "code.py") == said

"""Paragraphs and sentences of the documents are short, and their words plain; and what looks at them sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.prose import avoided, documents, of_words_alone, openings, problems
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


def test_docstrings_of_the_package_begin_with_a_short_sentence() -> None:
    files = sorted((ROOT / "unidist").rglob("*.py"))
    assert len(files) > 400
    assert [problem for file in files for problem in openings(file)] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"""What a rank sends."""\n', "1: 'What' begins a docstring"),
        ('class A:\n    """Those of P."""\n', "2: 'Those' begins a docstring"),
        ('class A:\n    def f(self):\n        """Of a row."""\n', "3: 'Of' begins a docstring"),
        ('async def f():\n    def g():\n        """That of a frame."""\n', "3: 'That' begins a docstring"),
        ('def f():\n    """Whether it is cut.\n\n    By rows.\n    """\n', "2: 'Whether' begins a docstring"),
        (f'def f():\n    """{"x" * 101}"""\n', "2: a docstring's first line has 101 characters"),
    ],
)
def test_a_planted_docstring_without_a_sentence_is_found(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(text)
    (found,) = openings(tmp_path / "code.py")
    assert said in found


@pytest.mark.parametrize(
    "text",
    [
        f'"""{"x" * 100}"""\n',
        'def f():\n    """Returns the rows.\n\n    What is gone is gone.\n    """\n    return "What is it?"\n',
        'def f():\n    """Offers it. Whatever it is."""\n',
        "class A:\n    pass\n",
    ],
)
def test_other_docstrings_are_fine(text: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(text)
    assert openings(tmp_path / "code.py") == []

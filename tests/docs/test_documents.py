"""What the documents point to exists, and what they say of the command is so."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from ci.prose import documents
from unidist import cli
from unidist.names import WHERE

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "CHANGELOG.md", *documents(ROOT)]
# A page longer than this is read by nobody: one fact has one home, and cases stand in tables.
MOST_WORDS = {"README.md": 1_100, "CHANGELOG.md": 900, "docs": 1_500, "docs/internals": 2_500}
MOST_WORDS_OF_ALL = 24_000


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_inside_the_project_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            found = document.parent / file if file else document
            assert found.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", found.read_text(), flags=re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, target


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_of_ours_that_are_named_exist(document: Path) -> None:
    for path in re.findall(r"`((?:tests|ci|docs|unidist|benchmarks)/[\w/.-]*\w)`", document.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_a_page_is_short(document: Path) -> None:
    bound = max((key for key in MOST_WORDS if name(document).startswith(key)), key=len)
    assert _words(document) <= MOST_WORDS[bound]


def test_all_pages_of_the_site_together_are_read_in_an_evening() -> None:
    assert sum(_words(page) for page in DOCUMENTS if page.parent != ROOT) <= MOST_WORDS_OF_ALL


def _words(page: Path) -> int:
    return len(page.read_text().split())


def test_every_error_is_explained_with_a_script_that_raises_it() -> None:
    """Beside what the script prints: tests/docs/test_pages.py runs it and compares."""
    _, *parts = re.split(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert sorted(sections) == sorted(name for name in WHERE if name.endswith("Error") and name != "UnidistError")
    for error, text in sections.items():
        assert f"except unidist.{error} as error:" in text
        assert text.index("```python") < text.index("```text")


def test_every_page_has_a_place_in_the_site() -> None:
    contents = tomllib.loads((ROOT / "docs" / "contents.toml").read_text())
    placed = [re.sub(r".*<(.*)>", r"\1", entry) for of in contents.values() for entry in of["pages"]]
    written = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in DOCUMENTS if page.parent != ROOT}
    assert sorted(placed) == sorted({*written, "api/index"} - {"index"})


def test_the_table_of_options_is_that_of_the_command() -> None:
    text = (ROOT / "docs" / "guide" / "several-machines.md").read_text()
    told = set(re.findall(r"`(--?[a-z-]+)`", "\n".join(line for line in text.splitlines() if line.startswith("| `-"))))
    parser = argparse.ArgumentParser()
    next(command for command in cli.commands() if command.name == "run").add(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    assert told == options - {"-h", "--help"}


def test_every_folder_of_tests_is_told() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    told = set(re.findall(r"`tests/(\w+)`", (ROOT / "docs" / "internals" / "contributing.md").read_text()))
    assert folders <= told

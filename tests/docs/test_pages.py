"""The examples of the pages run as they stand, and print what the pages show.

Programs run in processes that are forked with Keras imported: those that `python` starts, and those of `unidist run`,
which tests/launch gives many. Files with names are written into one folder, and the page's other commands run there as
a reader would run them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, Block, assert_printed, blocks, pages, run, write_files
from tests.docs.forked import run_forked, run_together

# A command may start a run after the other, of all frameworks.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

# Those whose examples other tests run: test_readme.py, tests/adapters/test_sockets.py, tests/drawing/test_documents.py.
ELSEWHERE = {"README.md", "docs/internals/adapters.md", "docs/pictures.md"}
PAGES = [page for page in pages() if page not in ELSEWHERE]
# What these pages say holds with Keras on JAX too.
ALSO_ON_JAX = ("docs/training.md", "docs/steps.md")
# Started by tests/launch/test_doctor.py.
DOCTOR = "unidist doctor -n 2"


def _programs(*documents: str) -> list[tuple[str, Block]]:
    return [(page, b) for page in documents for b in blocks(page) if b.language == "python" and b.file is None]


def _commands() -> list[tuple[str, Block]]:
    found = [(page, b) for page in PAGES for b in blocks(page) if b.language == "bash"]
    return [(page, b) for page, b in found if not b.text.startswith(("#!", DOCTOR))]


def _name(of: object) -> str:
    return f"line{of.line}" if isinstance(of, Block) else Path(str(of)).stem


@pytest.mark.parametrize(("page", "block"), _programs(*PAGES), ids=_name)
def test_a_program_runs(page: str, block: Block, tmp_path: Path) -> None:
    on_jax = 'unidist.use("jax"' in block.text.partition("import keras")[0]
    assert_printed(block, run_forked(block.text, tmp_path, "jax" if on_jax else "torch"))


@pytest.mark.parametrize(("page", "block"), _programs(*ALSO_ON_JAX), ids=_name)
def test_a_program_runs_on_jax(page: str, block: Block, tmp_path: Path) -> None:
    assert_printed(block, run_forked(block.text, tmp_path, "jax"))


@pytest.mark.parametrize(("page", "block"), _commands(), ids=_name)
def test_a_command_runs(page: str, block: Block, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    for command in block.text.strip().splitlines():
        program = tmp_path / command.removeprefix("python ")
        together = re.fullmatch(r"unidist run -n (\d+) (\w+\.py)", command)
        if program.exists():
            printed = run_forked(program.read_text(), tmp_path)
        elif together:
            printed = run_together(together[2], tmp_path, int(together[1]))
        else:
            printed = run(command, tmp_path, timeout=500)
    assert_printed(block, printed)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_file_with_a_name_is_run_by_a_command(page: str) -> None:
    """Otherwise nobody would run it."""
    commands = " ".join(b.text for b in blocks(page) if b.language == "bash")
    assert [b.file for b in blocks(page) if b.file and b.file not in commands] == []


def test_a_block_of_what_is_printed_follows_a_program() -> None:
    for page in PAGES:
        shown = (ROOT / page).read_text().count("\n```text\n")
        assert shown == sum(block.printed is not None for block in blocks(page)), page


def test_a_script_for_one_device_needs_three_lines_more() -> None:
    """What ci/newcomer.py measures."""
    (script,) = [block.text for block in blocks("docs/coming-from/keras.md") if block.file == "train.py"]
    added = [line.partition("#")[0].strip() for line in script.splitlines() if "# new" in line]
    assert len(added) == 3
    assert all("unidist" in line for line in added)
    assert "unidist" not in "".join(line for line in script.splitlines() if "# new" not in line)

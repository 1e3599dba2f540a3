"""Each script of examples/ prints what it says that it prints, on four virtual devices."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, Block, assert_printed
from tests.docs.forked import run_forked
from unidist.testing.processes import ProcessFailedError

pytestmark = pytest.mark.processes
PAGE = "docs/examples.md"
SCRIPTS = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
ARGUMENTS = {"switching_backends": ("sim",), "long_context": ("--length", "256")}


def _block(name: str) -> Block:
    """The script, and what its docstring says behind "It prints"."""
    text = SCRIPTS[name].read_text()
    said = ast.get_docstring(ast.parse(text)) or ""
    printed = said.partition("prints")[2].partition("\n\n")[2]
    assert printed, f"{name} does not say what it prints"
    return Block("python", text, 1, textwrap.dedent(printed))


@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - {"resume"}))
def test_it_prints_what_it_says(name: str, tmp_path: Path) -> None:
    block = _block(name)
    assert_printed(block, run_forked(block.text, tmp_path, arguments=ARGUMENTS.get(name, ())))


def test_the_backend_changes_and_not_the_numbers(tmp_path: Path) -> None:
    block = _block("switching_backends")
    assert_printed(block, run_forked(block.text, tmp_path, "jax", ("jax",)))


def test_a_training_that_was_killed_comes_to_the_loss_of_one_that_was_not(tmp_path: Path) -> None:
    block = _block("resume")
    with pytest.raises(ProcessFailedError, match="ended"):
        run_forked(block.text, tmp_path, arguments=("--kill-at", "13"))
    again = run_forked(block.text, tmp_path)
    assert_printed(block, again)
    undisturbed = run_forked(block.text, tmp_path, arguments=("--directory", "other"))
    assert again.splitlines()[-1] == undisturbed.strip()


def test_each_says_how_it_is_started_and_is_on_the_page() -> None:
    assert len(SCRIPTS) >= 10
    listed = set(re.findall(r"\(\.\./examples/(\w+)\.py\)", (ROOT / PAGE).read_text()))
    assert listed == {f for f in SCRIPTS if f"python examples/{f}.py" in SCRIPTS[f].read_text()} == set(SCRIPTS)

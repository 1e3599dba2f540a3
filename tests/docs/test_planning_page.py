"""The examples of docs/planning.md run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.documents import Block, blocks, run, write_files

PAGE = "docs/planning.md"
PROGRAMS = [block for block in blocks(PAGE) if block.language == "python" and block.file is None]


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: f"line{block.line}")
def test_examples_run(block: Block, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(f'import os\n\nos.environ["KERAS_BACKEND"] = "torch"\n{block.text}')
    run("python example.py", tmp_path)


def test_the_command_runs(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    commands = [block.text for block in blocks(PAGE) if block.language == "bash"]
    assert len(commands) == 1
    shown = run(commands[0], tmp_path)
    assert shown.count("second of a pair") == 24
    assert "slots of Adam" in shown

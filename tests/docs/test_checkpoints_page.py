"""The examples of docs/checkpoints.md run as they are, one after the other in one program."""

from __future__ import annotations

from pathlib import Path

from tests.docs.documents import blocks, run

PAGE = "docs/checkpoints.md"


def test_examples_run(tmp_path: Path) -> None:
    programs = [block.text for block in blocks(PAGE) if block.language == "python" and block.file is None]
    assert programs
    setting = 'import os\n\nos.environ["KERAS_BACKEND"] = "torch"\n'
    (tmp_path / "example.py").write_text("\n".join([setting, *programs]))
    run("python example.py", tmp_path)

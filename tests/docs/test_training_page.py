"""The examples of docs/training.md run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.documents import Block, blocks, run

PAGE = "docs/training.md"


@pytest.mark.parametrize("block", blocks(PAGE), ids=lambda block: f"line{block.line}")
@pytest.mark.parametrize("keras", ["torch", "jax"])
def test_examples_run(block: Block, keras: str, tmp_path: Path) -> None:
    assert block.language == "python"
    (tmp_path / "example.py").write_text(f'import os\n\nos.environ["KERAS_BACKEND"] = "{keras}"\n{block.text}')
    run("python example.py", tmp_path)

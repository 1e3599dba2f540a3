"""The examples of docs/checkpoints.md run as they are, one after the other in one program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.documents import blocks
from tests.docs.forked import run_forked

pytestmark = pytest.mark.processes
PAGE = "docs/checkpoints.md"


def test_examples_run(tmp_path: Path) -> None:
    programs = [block.text for block in blocks(PAGE) if block.language == "python" and block.file is None]
    assert programs
    run_forked("\n".join(programs), tmp_path)

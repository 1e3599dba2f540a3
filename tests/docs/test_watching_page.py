"""The doctor that docs/watching.md starts finds this machine in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.documents import blocks, run

pytestmark = pytest.mark.processes
PAGE = "docs/watching.md"


def test_the_doctor_finds_the_links_of_this_machine_in_order(tmp_path: Path) -> None:
    (command,) = (block.text.strip() for block in blocks(PAGE) if block.language == "bash")
    told = run(command, tmp_path)
    titles = ["versions", "machine", "network", "environment", "world"]
    assert [line for line in told.splitlines() if line in titles] == titles
    assert "1 of 1 are right" in told
    assert told.rstrip().endswith("nothing failed")

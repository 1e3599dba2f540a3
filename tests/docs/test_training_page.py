"""The examples of docs/training.md run as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests import preloaded
from tests.docs.documents import Block, blocks, run
from tests.visible import OF_KERAS
from unidist.testing.processes import ProcessWorld

PAGE = "docs/training.md"
EXAMPLES = pytest.mark.parametrize("block", blocks(PAGE), ids=lambda block: f"line{block.line}")


@EXAMPLES
def test_examples_run(block: Block, tmp_path: Path) -> None:
    assert block.language == "python"
    (tmp_path / "example.py").write_text(f'import os\n\nos.environ["KERAS_BACKEND"] = "torch"\n{block.text}')
    run("python example.py", tmp_path)


def as_a_program(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


@pytest.mark.processes
@EXAMPLES
def test_examples_run_on_jax(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own that has Keras imported. In which order they import it is seen on torch."""
    (tmp_path / "example.py").write_text(block.text)
    monkeypatch.chdir(tmp_path)
    with ProcessWorld(1, launcher=None, env=OF_KERAS["jax"], preload=preloaded.KERAS["jax"]) as world:
        world.call(as_a_program, str(tmp_path / "example.py"))

"""Notebooks run from top to bottom, and show what is kept in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from docs import run_notebooks
from tests.support.hiding import path_with

PAGES = sorted(run_notebooks.FOLDER.glob("*.ipynb"))

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_shows_what_is_kept(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "keras_hub" in page.read_text():
        # Rows of its models come by tf.data.
        monkeypatch.setenv("PYTHONPATH", path_with("tensorflow"))
    kept = _shown(nbformat.read(page, nbformat.NO_CONVERT))
    assert _shown(run_notebooks.run(page, tmp_path)) == kept
    assert any("image/svg+xml" in shown for shown in kept), "pictures are inline"


def test_a_cell_that_raises_and_one_that_shows_something_else_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.ipynb"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(1 + 1)")])
    nbformat.write(notebook, page)
    assert [shown["text"] for shown in _shown(run_notebooks.run(page, tmp_path))] == ["2\n"]
    notebook.cells[0].source = "1 / 0"
    nbformat.write(notebook, page)
    with pytest.raises(run_notebooks.CellExecutionError, match="ZeroDivisionError"):
        run_notebooks.run(page, tmp_path)


def _shown(notebook: Any) -> list[Any]:
    """What its cells print and draw, in their order."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.get("data", output) for output in outputs]

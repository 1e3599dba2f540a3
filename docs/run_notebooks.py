"""Runs docs/notebooks/*.ipynb from top to bottom, and keeps in them what they show. By hand, after a change of either:

    python docs/run_notebooks.py

`tests/docs/test_notebooks.py` holds that they show what is kept.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError as CellExecutionError
from traitlets.config import Config

FOLDER = Path(__file__).parent / "notebooks"
# Seconds of a cell.
PATIENCE = 60


def run(page: Path, folder: str | Path) -> Any:
    """Returns the notebook as a kernel of this Python shows it, which runs in the folder and has ended by now.

    Raises:
        CellExecutionError: a cell raised. CellTimeoutError: it took too long.
    """
    notebook = nbformat.read(page, nbformat.NO_CONVERT)
    path = os.pathsep.join(filter(None, (str(FOLDER.parents[1]), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"KERAS_BACKEND": "torch", "PYTHONPATH": path, "KERAS_HOME": str(folder)}
    env.pop("UNIDIST_BACKEND", None)
    where = {"metadata": {"path": str(folder)}}
    # Its messages go over sockets in a folder, and not over ports. A socket's path is short.
    with tempfile.TemporaryDirectory() as sockets:
        kernel = Config(AsyncKernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        NotebookClient(notebook, timeout=PATIENCE, record_timing=False, resources=where, config=kernel).execute(env=env)
    for cell in notebook.cells:
        # What takes long says so there, and how long that is differs.
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


if __name__ == "__main__":
    for page in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as empty:
            nbformat.write(run(page, empty), page)
        print(f"{page.name}: {page.stat().st_size:,} bytes")

"""Running programs of the documents in processes that have Keras imported: each in one of its own, forked.

In which order a program imports Keras and unidist is seen where it is run fresh: README's, and all commands.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

from tests import preloaded
from tests.visible import OF_KERAS
from unidist.testing.processes import ProcessWorld


def run_forked(text: str, folder: Path, keras: str = "torch", arguments: tuple[str, ...] = ()) -> str:
    """What the program prints that is run in the folder, by Keras on this backend."""
    (folder / "example.py").write_text(text)
    with ProcessWorld(1, launcher=None, env=OF_KERAS[keras], preload=preloaded.KERAS[keras]) as world:
        printed: str = world.call(as_a_program, str(folder), arguments)[0]
    return printed


def as_a_program(folder: str, arguments: tuple[str, ...]) -> str:
    os.chdir(folder)
    sys.argv = ["example.py", *arguments]
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path("example.py", run_name="__main__")
    return printed.getvalue()

"""Running the examples of a module's docstrings, in a process with the Keras that the module is for."""

from __future__ import annotations

import doctest
import importlib
import io
from contextlib import redirect_stdout

from unidist.backends import registry

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run(module: str) -> tuple[int, str]:
    """(how many examples there are, what those said that failed)."""
    said = io.StringIO()
    with redirect_stdout(said), registry.isolated():
        found = doctest.testmod(importlib.import_module(module), optionflags=FLAGS)
    return found.attempted, said.getvalue() if found.failed else ""

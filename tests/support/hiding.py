"""What is hidden from most tests: Keras imports it wherever it finds it, for seconds each time.

tests/conftest.py puts these folders first on the path: those of HIDDEN for all, those of FROM_PROGRAMS for the programs
that tests start. A module in them raises ImportError.
"""

from __future__ import annotations

import os

HIDDEN = {"tensorflow": "ci/without_tensorflow", "sklearn": "ci/without_sklearn"}
FROM_PROGRAMS = ("ci/without_jax",)


def path_with(module: str) -> str:
    """PYTHONPATH without what hides a module."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(entry for entry in path if entry and not entry.endswith(HIDDEN[module]))

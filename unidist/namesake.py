"""The other package that is called unidist: modin's, which installs a folder of the same name."""

from __future__ import annotations

import warnings
from pathlib import Path

# What it takes for UNIDIST_BACKEND, which both read.
THEIRS = ("ray", "mpi", "dask", "pymp", "pyseq")
REMEDY = (
    "pip uninstall unidist keras-unidist, then pip install FOLDER, where FOLDER is a checkout of this one; give the "
    "other one an environment of its own"
)


def version_beside(folder: Path) -> str | None:
    """The version of the other package, where it is installed into the same folder as this one; else None."""
    found = sorted(folder.glob("unidist-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").partition("-")[2] if found else None


def warn(folder: Path) -> None:
    """Warns where both are installed into one folder."""
    if (version := version_beside(folder)) is not None:
        warnings.warn(
            f"keras-unidist (Keras 3 models on many devices) and modin's unidist {version} are both installed in "
            f"{folder}, and each has overwritten files of the other: {REMEDY}. `import keras_unidist` gives this one",
            stacklevel=3,
        )


def told(name: str) -> str:
    """Returns what to say of a backend's name that is the other package's; "" where it is none."""
    if name.lower() not in THEIRS:
        return ""
    return f". {name!r} is a backend of modin's unidist, another package that reads UNIDIST_BACKEND too: unset it here"

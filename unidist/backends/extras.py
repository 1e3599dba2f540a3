"""The extras of this package: what each installs, and the command that installs it.

No command names the package itself: it is on no index, where a stranger could take its name.
"""

from __future__ import annotations

# As pyproject.toml has them, which a test compares; without its tools of development.
_KERAS = "keras>=3.15,<3.17"
EXTRAS = {
    "torch": (_KERAS, "torch>=2.13"),
    "jax": (_KERAS, "jax>=0.10"),
    "tensorflow": (_KERAS, "tensorflow>=2.21"),
    "horovod": (_KERAS, "horovod>=0.28.1"),
    "remote": ("fsspec>=2024.6",),
    "demo": ("scikit-learn>=1.5",),
}


def install(extra: str) -> str:
    """The command that installs what an extra does.

    Example:
        >>> install("jax")
        'pip install "keras>=3.15,<3.17" "jax>=0.10"'
    """
    return " ".join(("pip install", *(f'"{requirement}"' for requirement in EXTRAS[extra])))

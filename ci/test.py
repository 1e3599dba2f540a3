#!/usr/bin/env python3
"""All checks, on a machine with nothing but Python: `python3 ci/test.py`.

Makes a virtual environment outside the checkout, keyed on what it installs, with the versions of ci/constraints.txt.
Horovod is built from its source where no earlier run has left its wheel, which takes some minutes. Then ruff,
import-linter and mypy, then every test in one pytest run of two workers, the fast folders first. Ends at the first
failure of a check, or at the twentieth of a test.

    python3 ci/test.py                      all of it
    python3 ci/test.py tests/unit -k mesh   only these tests, with pytest's own arguments
    python3 ci/test.py --checks             only ruff, import-linter and mypy
    python3 ci/test.py --python             only the environment; prints its Python
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
HOROVOD = ROOT / "ci" / "install_horovod.sh"
EXTRAS = ("dev", "torch", "jax", "demo")
# Fast first: a failure shows early.
FOLDERS = ("unit", "sim", "torch", "horovod", "jax", "tensorflow", "launch", "planner", "keras", "parity", "docs")
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("lint-imports",),
    ("mypy",),
)
# Two: a test starts up to four processes of its own. By files: the processes and references of one are shared.
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
KEPT_DAYS = 30


def main(arguments: list[str]) -> int:
    # A shell's background jobs ignore Ctrl-C, and so would the tests' programs, which tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    python = environment()
    if arguments == ["--python"]:
        print(python)
        return 0
    tests = arguments or [f"tests/{folder}" for folder in FOLDERS if (ROOT / "tests" / folder).is_dir()]
    if not arguments or arguments == ["--checks"]:
        for check in CHECKS:
            if code := run(python.parent / check[0], *check[1:]):
                return code
        if arguments:
            return 0
    return run(python, "-m", "pytest", "--maxfail=20", "--durations=10", *WORKERS, *tests)


def environment() -> Path:
    """The Python of the virtual environment, made where it is missing or was left half made."""
    wanted = requirements()
    content = "\n".join([sys.version, *wanted, CONSTRAINTS.read_text(), HOROVOD.read_text()])
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unidist-ci"
    base.mkdir(parents=True, exist_ok=True)
    home = base / hashlib.sha256(content.encode()).hexdigest()[:16]
    done = home / "complete"
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            say(f"making {home}")
            venv.create(home, clear=True, with_pip=True)
            pip = (home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            if code := run(*pip, "--constraint", CONSTRAINTS, *wanted) or run(HOROVOD, home / "bin" / "python"):
                sys.exit(code)
        done.touch()
        forget_unused(base)
    return home / "bin" / "python"


def requirements() -> list[str]:
    """What the package and the extras under test depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    # tensorflow-cpu: tests feed tf.data to models on torch and JAX, and Horovod moves its tensors.
    # tensorboard: Keras's callback writes for it. keras-hub: its models are trained under tensor parallelism.
    others = ("tensorflow-cpu", "tensorboard", "keras-hub")
    return [*project["dependencies"], *(one for extra in EXTRAS for one in optional[extra]), *others]


def forget_unused(base: Path) -> None:
    """Removes environments that no run has used for a while: each is some gigabytes."""
    for done in base.glob("*/complete"):
        if time.time() - done.stat().st_mtime > KEPT_DAYS * 86400:
            shutil.rmtree(done.parent)


def run(*command: str | Path) -> int:
    """Runs a command in the checkout, with this checkout's package and without the caller's Python settings."""
    say(" ".join(str(part) for part in command))
    return subprocess.run(command, cwd=ROOT, env=surroundings(Path(command[0]), ROOT)).returncode


def surroundings(program: Path, checkout: Path) -> dict[str, str]:
    """The environment of a program of the virtual environment, with a checkout's package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = os.pathsep.join((str(program.parent), os.environ.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "PYTHONPATH": str(checkout)}


def say(text: str) -> None:
    print(f"ci: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

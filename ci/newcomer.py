#!/usr/bin/env python3
"""What a new user meets, on this machine, in minutes: `python3 ci/newcomer.py`. Run by hand, after the README changed.

In a copy of the checkout, and an environment that has nothing in it yet:

1. The README's first line, word for word, up to the end of `unidist demo`, the first sharded training.
2. The README's first program.
3. The script of docs/coming-from/keras.md: without the lines that are marked new, then with them in two processes.
   With dropout, and without: then both end with the same numbers.

What pip installs has the versions of ci/constraints.txt. Downloads are part of the minutes. The first failure ends it.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEW = "# new"
MOST_LINES, MOST_MINUTES, LARGEST_DIFFERENCE = 3, 5.0, 1e-5
DROPOUT = "keras.layers.Dropout(0.5)"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="unidist-newcomer-") as folder:
        checkout = Path(folder) / "unidist"
        ignored = shutil.ignore_patterns(".git", "_build", "__pycache__", "*.egg-info", ".*_cache")
        shutil.copytree(ROOT, checkout, ignore=ignored)
        line = _fence(checkout / "README.md", "bash")
        seconds = sum(_timed(command, checkout)[0] for command in line.strip().split(" && "))
        minutes = seconds / 60
        print(f"{minutes:5.1f} min until the first sharded training has ended")
        _readme(checkout)
        _own_script(checkout)
    return int(minutes > MOST_MINUTES)


def _readme(checkout: Path) -> None:
    (checkout / "train.py").write_text(_fence(checkout / "README.md", "python"))
    print(_last(_timed(".venv/bin/python train.py", checkout)[1]))


def _own_script(checkout: Path) -> None:
    """From a script for one device to two processes."""
    after = _fence(checkout / "docs" / "coming-from" / "keras.md", "python")
    before = "".join(line for line in after.splitlines(keepends=True) if NEW not in line)
    added = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    print("the diff:", *added, sep="\n    ")
    if len(added) > MOST_LINES or any(line[0] == "-" for line in added):
        sys.exit(f"more than {MOST_LINES} lines are added, or one is changed")
    for words, of in (("with dropout", lambda text: text), ("without", lambda text: _without_dropout(text))):
        (checkout / "train.py").write_text(of(before))
        one = _numbers(_timed(".venv/bin/python train.py", checkout, KERAS_BACKEND="torch")[1])
        (checkout / "train.py").write_text(of(after))
        two = _numbers(_timed(".venv/bin/unidist run -n 2 train.py", checkout)[1])
        print(f"{words}: (loss, accuracy) of one device {one}, of two processes {two}")
    if max(abs(a - b) for a, b in zip(one, two, strict=True)) > LARGEST_DIFFERENCE:
        sys.exit(f"without dropout they differ by more than {LARGEST_DIFFERENCE}")


def _without_dropout(text: str) -> str:
    assert text.count(DROPOUT) == 1
    return text.replace(DROPOUT, "keras.layers.Dropout(0.0)")


def _numbers(printed: str) -> tuple[float, float]:
    """(loss, accuracy) that every process printed."""
    found = set(re.findall(r"test loss (\S+), accuracy (\S+)$", printed, re.MULTILINE))
    if len(found) != 1:
        sys.exit(f"not one result but {sorted(found)}:\n{printed}")
    ((loss, accuracy),) = found
    return float(loss), float(accuracy)


def _fence(page: Path, language: str) -> str:
    """The first block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"{page} has no block of {language}")
    return found[1]


def _last(printed: str) -> str:
    return printed.strip().splitlines()[-1]


def _timed(command: str, folder: Path, **settings: str) -> tuple[float, str]:
    """Seconds of a command, and what it printed. It sees no settings of Keras, unidist and Python but these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KERAS", "UNIDIST", "PYTHON"))}
    env = {**kept, "PIP_CONSTRAINT": str(ROOT / "ci" / "constraints.txt"), **settings}
    began = time.monotonic()
    done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    print(f"{seconds:5.1f} s  {command}", flush=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nended with {done.returncode}")
    return seconds, done.stdout


if __name__ == "__main__":
    sys.exit(main())

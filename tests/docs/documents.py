"""The examples of a document: its fenced blocks, and running them as a reader would."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from ci.prose import documents

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_AS_SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_NAME = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        file: the name that its first line, a comment, gives it.
        printed: what it prints, where the next block is `text`; "..." stands for anything, as in doctest.
    """

    language: str
    text: str
    line: int
    printed: str | None = None

    @property
    def file(self) -> str | None:
        found = _NAME.match(self.text)
        return found[1] if found else None


def pages() -> list[str]:
    """README and the pages of docs."""
    return [str(page.relative_to(ROOT)) for page in documents(ROOT)]


def blocks(document: str) -> list[Block]:
    """Those of code, each with what it prints."""
    text = (ROOT / document).read_text()
    found = list(_FENCE.finditer(text))
    return [
        Block(
            m[1],
            m[2],
            text.count("\n", 0, m.start()) + 1,
            following[2] if following and following[1] == "text" else None,
        )
        for m, following in zip_longest(found, found[1:])
        if m[1] != "text"
    ]


def assert_printed(block: Block, found: str) -> None:
    """What a block printed is what its page shows."""
    if block.printed is not None:
        assert doctest.OutputChecker().check_output(block.printed, found, _AS_SHOWN), f"it printed:\n{found}"


def assert_demo(shown: str) -> None:
    """What `unidist demo` promises: its bounds are kept, and it shows layouts, traffic and memory."""
    assert "MISS" not in shown
    assert shown.count("ok  ") == 3
    assert "Mesh({'data': 2, 'model': 2})" in shown
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert " ".join(lines["wide/kernel"][1:]) == "split on dim 1 over model 256x256 256x128 131,072 50%"
    assert lines["norm/gamma"][1] == "replicated"
    assert int(lines["all_reduce"][-1].replace(",", "")) > 1_000_000


def table(document: str, head: str) -> list[list[str]]:
    """The rows of the table whose first line is `head`: the text of each cell, without backticks."""
    lines = (ROOT / document).read_text().splitlines()
    start = lines.index(head)
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def write_files(document: str, folder: Path) -> None:
    """Writes the blocks that have names, as a reader would save them."""
    for block in blocks(document):
        if block.file is not None:
            (folder / block.file).write_text(block.text)


def run(command: str | list[str], folder: Path, timeout: float = 200.0) -> str:
    """Runs a command in a folder; `python` and `unidist` are those of these tests. Its standard output.

    It sees no settings of Keras and unidist, as on a machine where nobody has set any.
    """
    words = shlex.split(command) if isinstance(command, str) else command
    known = {"python": [sys.executable], "unidist": [sys.executable, "-m", "unidist"]}
    words = [*known.get(words[0], [words[0]]), *words[1:]]
    unset = ("KERAS_BACKEND", "UNIDIST_BACKEND", "JAX_NUM_CPU_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    path = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT))))
    env |= {"KERAS_HOME": str(folder / "keras"), "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "COLUMNS": "120"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout

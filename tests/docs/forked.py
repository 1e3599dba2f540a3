"""Running programs of the documents in processes that have Keras imported: forked ones, of each program its own.

In which order a program imports Keras and unidist is seen where it is run fresh: README's.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from tests import preloaded
from tests.support.hiding import HIDDEN
from tests.visible import OF_KERAS
from unidist.testing.processes import ProcessWorld


def run_forked(text: str, folder: Path, keras: str = "torch", arguments: tuple[str, ...] = ()) -> str:
    """What the program prints that is run in the folder, by Keras on this backend."""
    (folder / "example.py").write_text(text)
    with ProcessWorld(1, launcher=None, env=OF_KERAS[keras], preload=preloaded.KERAS[keras]) as world:
        printed: str = world.call(as_a_program, str(folder), "example.py", arguments)[0]
    return printed


def run_together(name: str, folder: Path, count: int) -> str:
    """What a program of the folder prints on torch in so many processes, each line with its rank.

    One that ends without a word prints nothing.
    """
    lines: list[str] = []
    with ProcessWorld(count, env=OF_KERAS["torch"], preload=preloaded.KERAS["torch"]) as world:
        for rank, outcome in sorted(world.outcomes(as_a_program, str(folder), name, ()).items()):
            if outcome.failure is not None and outcome.failure.kind != "ended":
                raise outcome.failure
            lines += [f"[{rank}] {line}\n" for line in (outcome.value or "").splitlines()]
    return "".join(lines)


def run_command(*arguments: str, keras: str = "torch", visible: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """What `unidist ...` ends with and prints, on both streams; `visible`: modules that are hidden from other tests."""
    with ProcessWorld(1, launcher=None, env=OF_KERAS[keras], preload=preloaded.KERAS[keras], timeout=240.0) as world:
        ended: tuple[int, str, str] = world.call(as_a_command, arguments, visible)[0]
    return ended


def as_a_command(arguments: tuple[str, ...], visible: tuple[str, ...]) -> tuple[int, str, str]:
    from unidist import cli

    os.environ["COLUMNS"] = "100"
    sys.path[:] = [entry for entry in sys.path if not entry.endswith(tuple(HIDDEN[name] for name in visible))]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def as_a_program(folder: str, name: str, arguments: tuple[str, ...]) -> str:
    os.chdir(folder)
    sys.argv = [name, *arguments]
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(name, run_name="__main__")
    return printed.getvalue()

"""What the fork server refuses, and what it hands on: modules of the test's own, in a folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from unidist.launch.forkserver import Forked, ForkServer, Program
from unidist.launch.preloading import _agreed

pytestmark = pytest.mark.processes
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
SETS = "import os\nos.environ['SET_BY_IMPORT'] = 'yes'\n"

Started = Callable[..., ForkServer]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Starts a server like a program that had imported "framework" from the test's folder."""
    servers: list[ForkServer] = []

    def start(text: str, told: dict[str, str] | None = None, absent: Sequence[str] = ()) -> ForkServer:
        for name in ("packages", "own"):
            (tmp_path / name).mkdir()
        file = tmp_path / "packages" / "framework.py"
        file.write_text(text)
        said = {"modules": {"framework": str(file)} | (told or {}), "absent": list(absent), "environ": {}}
        (tmp_path / "told").write_text(json.dumps(said))
        program = Program(tmp_path / "told", str(tmp_path / "own"), ["framework", "unidist"])
        path = os.pathsep.join([str(tmp_path / "packages"), *filter(None, sys.path)])
        servers.append(ForkServer({**os.environ, "PYTHONPATH": path}, program=program))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def refused(server: ForkServer) -> str:
    with pytest.raises(RuntimeError) as error:
        server.wait()
    return str(error.value)


def said_by(server: ForkServer, folder: Path, text: str) -> str:
    """What a forked process prints that runs a program."""
    script = folder / "script.py"
    script.write_text(f"def main():\n    {text}\n")
    out = folder / "out"
    with out.open("wb") as file, open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), file.fileno(), 2)
        child: Forked = server.fork(f"{script}:main", dict(os.environ), *streams, command=[str(script)])
        assert child.wait(30) == 0
    return out.read_text()


def test_threads_of_an_import_are_refused(started: Started) -> None:
    assert refused(started(THREAD)) == "what was imported has started 1 threads"


def test_an_import_that_fails_is_told(started: Started) -> None:
    said = refused(started("1 / 0"))
    assert said == "importing framework failed: ZeroDivisionError: division by zero"


def test_a_server_that_ends_amid_an_import_is_told(started: Started) -> None:
    assert "ended with exit code 7 while it imported" in refused(started("import os\nos._exit(7)"))


def test_a_program_that_had_another_file_is_refused(started: Started) -> None:
    """As where it had changed sys.path before."""
    assert refused(started("", {"json": "/elsewhere/json.py"})) == "the program has a module json of its own"


def test_a_program_that_hides_a_module_is_refused(started: Started) -> None:
    assert refused(started("import wave", absent=["wave"])) == "the program has a module wave of its own"


def test_a_module_of_the_programs_folder_is_not_hidden(started: Started, tmp_path: Path) -> None:
    """It has not imported that yet: it would find the one of an import of ours."""
    server = started("import wave")
    (tmp_path / "own" / "wave.py").touch()
    assert refused(server) == "the program has a module wave of its own"


def test_what_an_import_sets_is_in_the_environment(started: Started, tmp_path: Path) -> None:
    server = started(SETS)
    server.wait()
    text = "import os, sys; print(os.environ['SET_BY_IMPORT'], 'framework' in sys.modules)"
    assert said_by(server, tmp_path, text) == "yes True\n"


def test_forked_processes_draw_numbers_of_their_own(started: Started, tmp_path: Path) -> None:
    """NumPy draws its seed when it is imported."""
    server = started("import numpy.random")
    server.wait()
    text = "import numpy, random; print(numpy.random.random(), random.random())"
    drawn = " ".join(said_by(server, tmp_path, text) for _ in range(3)).split()
    assert len(set(drawn)) == 6


def test_each_forked_process_has_a_record_of_its_own(started: Started, tmp_path: Path) -> None:
    server = started("import unidist.flight.recorder")
    server.wait()
    text = "import os; from unidist.flight.recorder import recorder as r; r.stepped(); "
    text += "print(r._whole[6], r._whole[3] == os.getpid())"
    assert [said_by(server, tmp_path, text) for _ in range(2)] == ["1 True\n"] * 2


def test_processes_that_set_variables_apart_are_refused() -> None:
    common = {"KERAS_BACKEND": "torch", "HOME": None}
    assert _agreed([common | {"UNIDIST_X": "0", "RANK": "0"}, common | {"UNIDIST_X": "1"}]) == common
    with pytest.raises(RuntimeError, match="change KERAS_BACKEND in their environments, each in its own way"):
        _agreed([common, common | {"KERAS_BACKEND": "jax"}])

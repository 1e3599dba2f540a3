"""`unidist.notebook_run`: a function's source goes to new processes, plain values to and fro, and all of them end."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

import unidist
from tests.launch.runs import alive
from tests.notebook import cells
from unidist import CapabilityError, RankFailedError, notebook_run
from unidist.launch.request import LaunchError
from unidist.notebook import values
from unidist.notebook.program import text_of


def notebook() -> types.ModuleType:
    """The cells as a notebook has them: in a module that nobody can import."""
    module = types.ModuleType("__main__of_a_notebook")
    exec(compile(Path(cells.__file__).read_text(), cells.__file__, "exec"), vars(module))
    return module


CELLS = notebook()


@pytest.fixture(autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs have their folders; none of them is left."""
    place = tmp_path_factory.mktemp("runs")
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@pytest.mark.processes
def test_a_function_of_a_notebook_runs_in_processes(folders, capsys) -> None:
    found = notebook_run(CELLS.total, [1, 20], backend="torch", scale=2.0, timeout=120)
    np.testing.assert_array_equal(found["sum"], [42.0, 42.0])
    np.testing.assert_array_equal(found["rest"][1], [1.0, 2.0, 3.0])
    assert (found["rest"][0], *found["rest"][2:]) == (100, True, None)
    assert found[7] == "b"
    out = capsys.readouterr().out.splitlines()
    assert sorted(out) == ["[0] mine is 1", "[1] mine is 20"]
    assert list(folders.iterdir()) == []


@pytest.mark.processes
def test_a_ranks_error_is_an_exception_with_its_traceback(folders) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        notebook_run(CELLS.fails_on_one, 300.0, backend="torch", timeout=200)
    error = caught.value
    assert time.monotonic() - began < 150
    assert (error.rank, error.kind) == (1, "ValueError")
    assert str(error).startswith("rank 1 of 2: ValueError: no such <thing>")
    assert 'raise ValueError("no such <thing>")' in error.trace
    assert "child.py" not in error.trace
    assert list(folders.iterdir()) == []


@pytest.mark.processes
def test_an_interrupted_cell_ends_its_processes(tmp_path, folders) -> None:
    def interrupt() -> None:
        while len(list(tmp_path.glob("pid-?"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        notebook_run(CELLS.stays, str(tmp_path), backend="torch", timeout=200)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-?")]
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert list(folders.iterdir()) == []


@pytest.mark.processes
def test_a_function_that_takes_too_long_is_ended(tmp_path, folders) -> None:
    with pytest.raises(RankFailedError, match=r"stays did not return within 0\.3 s") as caught:
        notebook_run(CELLS.stays, str(tmp_path), backend="torch", timeout=0.3)
    assert (caught.value.rank, caught.value.kind) == (None, "timeout")
    assert list(folders.iterdir()) == []


# what is written ----------------------------------------------------------------------------------------------------


def test_the_program_has_what_the_function_uses(tmp_path) -> None:
    text, held = text_of(CELLS.total, tmp_path, "torch")
    compile(text, "program", "exec")
    assert text.index('unidist.use("torch")'.replace('"', "'")) < text.index("import numpy as np")
    assert "from pathlib import Path as Path" in text
    assert text.index("def plus_offset") < text.index("def total")
    assert "def even" in text
    assert "fails_on_one" not in text
    assert held.keys() == {"OFFSET", "TABLE"}
    assert "MESH" not in text


def test_classes_of_a_notebook_go_with_what_they_use(tmp_path) -> None:
    text, held = text_of(CELLS.makes_a_thing, tmp_path, "torch")
    assert held.keys() == {"TABLE"}
    made = {"TABLE": held["TABLE"]}
    exec(compile(text[text.index("class Thing") : text.index("if __name__")], "program", "exec"), made)
    assert made["makes_a_thing"]() == 8


def test_names_that_a_function_makes_itself_are_not_looked_for(tmp_path) -> None:
    text, held = text_of(CELLS.shadows, tmp_path, "torch")
    compile(text, "program", "exec")
    assert "MESH" not in held


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 0, "found <lambda>: write one around it"),
        (print, "found print: write one around it"),
        (3, "found int: write one around it"),
        (CELLS.around(), "inside uses outside of a function around it"),
        (CELLS.decorated(CELLS.total), "of a function around it"),
        (CELLS.Thing.method, "Thing.method is a method"),
        (CELLS.returns_a_model, "returns_a_model uses MESH, a Mesh of the notebook"),
        (CELLS.uses_another_name, "which is plus_offset by another name"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_cannot_stand_alone_is_an_error_before_anything_starts(function, words, monkeypatch) -> None:
    monkeypatch.setattr(unidist.launch, "run", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(LaunchError, match=words):
        notebook_run(function, backend="torch")


def test_options_that_do_not_fit_are_errors(monkeypatch) -> None:
    for wrong in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(LaunchError, match="give seconds above 0"):
            notebook_run(CELLS.plus_offset, 1, timeout=wrong)
    with pytest.raises(LaunchError, match="must be 1 or more"):
        notebook_run(CELLS.plus_offset, 1, processes=0)
    with pytest.raises(CapabilityError, match="its ranks live in one process"):
        notebook_run(CELLS.plus_offset, 1, backend="sim")
    with pytest.raises(LaunchError, match="an argument is or has a Mesh"):
        notebook_run(CELLS.plus_offset, [cells.MESH])


def test_files_are_for_their_user_alone(monkeypatch, folders) -> None:
    seen = {}

    def look(request, **_):
        program = Path(request.command[0])
        for path in (program.parent, *program.parent.rglob("*")):
            seen[path.name] = stat.S_IMODE(path.stat().st_mode)
        values.write("done", program.parent / "result.npz", "")
        return 0

    monkeypatch.setattr(unidist.launch, "run", look)
    assert notebook_run(CELLS.plus_offset, np.ones(2)) == "done"
    assert {"plus_offset.py", "arguments.npz", "names.npz"} <= set(seen)
    assert {mode for name, mode in seen.items() if "." in name} == {0o600}
    assert {mode for name, mode in seen.items() if "." not in name} == {0o700}


VALUES = [
    None,
    True,
    [1, 2.5, "a", None],
    (1, (2, [3])),
    {"a": {1: (2,)}, (1, 2): "tuple"},
    10**40,
    float("inf"),
    "\ud800 <b>",
    ["tuple", 1],
    {},
    (),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_as_they_were(value, tmp_path) -> None:
    values.write(value, tmp_path / "x", "")
    found = values.read(tmp_path / "x")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", "U3", ">f4"])
def test_arrays_come_back_as_they_were(dtype, tmp_path) -> None:
    for k, value in enumerate((np.ones((2, 3)).astype(dtype), np.zeros((0, 2), dtype), np.ones((), dtype)[()])):
        values.write([value], tmp_path / str(k), "")
        (found,) = values.read(tmp_path / str(k))
        np.testing.assert_array_equal(found, value)
        assert (found.dtype, type(found)) == (value.dtype, type(value))


def test_other_values_are_refused(tmp_path) -> None:
    endless: list = []
    endless.append(endless)
    for k, wrong in enumerate((object(), {1, 2}, np.array([None]), b"bytes", [lambda: 0], endless)):
        with pytest.raises(LaunchError, match=r"^it "):
            values.write(wrong, tmp_path / str(k), "it")
        assert not list(tmp_path.iterdir())
        assert not values.is_plain(wrong)


class _Opened:
    def __reduce__(self):
        return (os.mkdir, (os.environ["UNIDIST_TEST_MARK"],))


def test_nothing_is_unpickled(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("UNIDIST_TEST_MARK", str(tmp_path / "mark"))
    tree = np.frombuffer(b'["list", ["array", 0]]', np.uint8)
    with (tmp_path / "x").open("wb") as file:
        np.savez(file, np.array([_Opened()], dtype=object), tree=tree)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        values.read(tmp_path / "x")
    assert not (tmp_path / "mark").exists()

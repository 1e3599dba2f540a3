"""The demo: it keeps its bounds, shows what it promises, and says so by its exit code where it does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.docs.documents import assert_demo
from tests.docs.forked import run_command
from tests.support.hiding import HIDDEN, path_with
from tests.support.sampling import unless_all
from unidist import demo
from unidist.backends import installed
from unidist.errors import BackendNotAvailableError, MeshError

pytestmark = pytest.mark.slow


# On torch in the simulator, as without an argument: the README's first line, in test_readme.py.
@pytest.mark.parametrize(("keras", "backend"), [*unless_all((), (("torch", "sim"),)), ("jax", "jax")])
def test_it_keeps_its_bounds_and_shows_layouts_traffic_and_memory(keras: str, backend: str) -> None:
    code, out, err = run_command("demo", "--backend", backend, keras=keras, visible=("sklearn",))
    assert code == 0, out + err
    assert_demo(out)


def test_a_missed_bound_is_a_non_zero_exit_code_on_any_mesh() -> None:
    """After an epoch the digits are not learned yet; the numbers are one device's all the same."""
    command = [sys.executable, "-m", "unidist", "demo", "--epochs", "1", "--mesh", "data=1,model=2", "--quiet"]
    env = {**os.environ, "KERAS_BACKEND": "torch", "COLUMNS": "100", "PYTHONPATH": path_with("sklearn")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MISS  accuracy on held-back digits" in done.stdout
    assert (done.stdout.count("MISS  "), done.stdout.count("ok  ")) == (1, 2)
    assert "Mesh({'data': 1, 'model': 2})" in done.stdout
    assert "Warning" not in done.stderr, "a newcomer would look for what is wrong"


def test_without_scikit_learn_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BackendNotAvailableError, match=re.escape(installed.install("demo"))):
        demo.main([])


@pytest.mark.parametrize("arguments", [["--mesh", "rows=2"], ["--mesh", "data=2,model=2", "--devices", "8"]])
def test_a_mesh_that_cannot_be_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith(HIDDEN["sklearn"])])
    with pytest.raises(MeshError, match="--mesh"):
        demo.main(arguments)


def test_where_devices_are_processes_it_says_how_to_start_them() -> None:
    code, out, err = run_command("demo", "--backend", "torch", visible=("sklearn",))
    assert (code, out) == (2, "")
    assert "`unidist run -n 4 --backend torch -m unidist demo --backend torch`" in err

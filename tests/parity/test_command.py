"""`unidist parity`: one function on several backends, and where the numbers part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sampling import unless_all
from tests.visible import WITH_TENSORFLOW
from unidist.parity import worker
from unidist.parity.spec import ParityError

pytestmark = pytest.mark.processes

EVERY = ("sim", "torch", "jax", "tensorflow", "horovod")
# The command of docs/guide/numbers.md runs on sim, torch and jax (tests/docs/test_pages.py). Horovod's processes are
# started as torch's.
NAMES = unless_all(("tensorflow",), EVERY)

TRAIN = """
import pathlib

import keras
import numpy as np

import unidist


def build(rate=0.05):
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "tanh", name="wide"), keras.layers.Dense(1, name="narrow")]
    )
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    return model


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(20, 8)).astype("float32"), rng.normal(size=(20, 1)).astype("float32")


def in_scope():
    build().fit(*data(), batch_size=8, epochs=2)


def with_mesh(mesh):
    if mesh is None:
        return in_scope()
    rules = {".*wide/kernel": (None, "model"), ".*wide/bias": ("model",), ".*narrow/kernel": ("model", None)}
    with unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules)).scope():
        in_scope()


def trains_otherwise_and_fails(mesh):
    ran = pathlib.Path("ran")
    if ran.exists():
        raise RuntimeError("this run is broken")
    model = build()
    if mesh is not None:
        ran.touch()
        model.get_layer("wide").trainable = False
    strategy = unidist.DataParallel(mesh) if mesh is not None else None
    if strategy is not None:
        unidist.parallelize(model, strategy)
    model.fit(*data(), batch_size=8)


def trains_nothing():
    build()
"""


def parity(folder: Path, function: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "unidist", "parity", f"train.py:{function}", *options]
    env = {**os.environ, **(WITH_TENSORFLOW if any("tensorflow" in option for option in options) else {})}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, env=env)


def rows(text: str) -> dict[str, list[str]]:
    """The table of differences: run -> its cells."""
    lines = text.splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith("run "))
    cells = [[c.strip() for c in line.split("  ") if c.strip()] for line in lines[head + 1 :]]
    return {row[0]: row[1:] for row in cells[: cells.index([])]}


def test_every_backend_trains_as_one_device(tmp_path: Path) -> None:
    """By a function without a mesh, which runs in the scope of a strategy."""
    mesh, function = unless_all(("data=2", "in_scope"), ("data=2,model=2", "with_mesh"))
    done = parity(tmp_path, function, "--mesh", mesh, "--backends", ",".join(NAMES))
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(done.stdout)
    alone = unless_all(["tensorflow"], ["torch", "jax", "tensorflow"])
    alone = [f"one device ({keras})" for keras in alone]
    assert set(found) == {*alone, *NAMES}
    assert found[alone[0]] == ["1", "-", "-", "the reference"]
    for name in (*NAMES, *alone[1:]):
        size, loss, weight, where = found[name]
        assert size == ("1" if "device" in name else unless_all("2", "4"))
        assert where == "none"
        assert float(loss) <= 1e-5
        # Sums in another order: equal to the last bit would mean that nothing ran on the mesh.
        assert 0 < float(weight) <= 1e-5
    assert len(done.stdout.splitlines()[0].split()) == 3 + 5, "five steps"
    assert done.stdout.rstrip().endswith("all agree with one device")


def test_what_differs_first_is_named_and_a_run_that_fails_is_shown_with_what_it_said(tmp_path: Path) -> None:
    done = parity(tmp_path, "trains_otherwise_and_fails", "--backends", "sim,sim:torch", "--steps", "3")
    assert done.returncode == 1
    assert rows(done.stdout)["sim"][3].startswith("sequential/wide/kernel at step 1: ")
    assert "sim failed: exit code 1" in done.stdout
    assert "RuntimeError: this run is broken" in done.stdout
    assert done.stdout.rstrip().endswith("NOT the numbers of one device")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("train.py",), "write FILE.py:function"),
        (("other.py:train",), "no such file: 'other.py'"),
        (("train.py:in_scope", "--mesh", "data"), "write axes and sizes, each once"),
        (("train.py:in_scope", "--backends", "mine"), "unknown backend 'mine'"),
        (("train.py:in_scope", "--backends", "mine:torch"), "unknown backend 'mine'"),
        (("train.py:in_scope", "--steps", "0"), "--steps must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "unidist", "parity", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert text in done.stderr


def test_a_function_that_trains_nothing(tmp_path: Path) -> None:
    done = parity(tmp_path, "trains_nothing", "--backends", "sim")
    assert done.returncode == 1
    assert "trained nothing: it must call fit" in done.stdout


def test_a_function_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ParityError, match="has no function 'missing'"):
        worker._function(f"{tmp_path}/train.py:missing")

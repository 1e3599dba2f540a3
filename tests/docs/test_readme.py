"""Every example of the README does what the README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, Block, assert_demo, assert_printed, blocks, run, table
from tests.docs.forked import run_forked
from tests.support.hiding import path_with
from tests.support.sampling import unless_all

pytestmark = pytest.mark.processes
README = "README.md"
CHOICES = table(README, "| line | start it with |")
SCOPES = table(README, "| the scope | weights on a device | slots on a device |")
# The rows of several processes differ in a name: tests/launch gives the command programs that name none, and
# tests/parity compares torch and Horovod with one device in many models.
TRIED = unless_all([row for row in CHOICES if row[1].startswith("python")], CHOICES)
USE = 'unidist.use("sim", devices=4)'


def _named(name: str) -> Block:
    return next(block for block in blocks(README) if block.file == name)


def test_every_block_is_run_by_a_test_here() -> None:
    """A block of another kind, or a file that nobody starts, would be an example that nobody checks."""
    assert {block.language for block in blocks(README)} == {"bash", "python"}
    assert [block.file for block in blocks(README) if block.language == "python"] == ["small.py", "train.py"]
    bash = [block.text.strip() for block in blocks(README) if block.language == "bash"]
    assert bash == [
        'python3 -m venv .venv && .venv/bin/pip install ".[torch,demo]" && .venv/bin/unidist demo',
        "python3 ci/test.py",  # runs these tests: it cannot be run by them
    ]
    assert (ROOT / "ci" / "test.py").exists()


def test_it_is_short() -> None:
    assert len((ROOT / README).read_text().splitlines()) < 150


def test_the_smallest_program_prints_what_is_shown(tmp_path: Path) -> None:
    block = _named("small.py")
    assert block.printed is not None
    assert_printed(block, run_forked(block.text, tmp_path))


@pytest.mark.parametrize(("scope", "weights", "slots"), SCOPES, ids=[row[0] for row in SCOPES])
def test_a_stage_of_zero_changes_what_a_device_holds_and_no_loss(
    scope: str, weights: str, slots: str, tmp_path: Path
) -> None:
    block = _named("small.py")
    losses = (block.printed or "").splitlines()[0]
    found = run_forked(block.text.replace(SCOPES[0][0], scope), tmp_path).splitlines()
    assert found == [losses, f"a device holds {weights} bytes of weights, {slots} of slots"]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """train.py without its strategy: the loss by Keras backend."""
    folder = tmp_path_factory.mktemp("one_device")
    text = _named("train.py").text
    assert text.count("with unidist.ModelParallel(mesh).scope():") == 1
    found = {}
    for keras, name in (("torch", "sim"), ("jax", "jax")):
        changed = text.replace("with unidist.ModelParallel(mesh).scope():", "if True:")
        found[keras] = _loss(run_forked(changed.replace(USE, f'unidist.use("{name}", devices=4)'), folder, keras))
    return found


@pytest.mark.parametrize(("line", "command"), TRIED, ids=[row[0] for row in TRIED])
def test_one_line_changes_the_backend_and_not_the_numbers(
    line: str, command: str, one_device: dict[str, float], tmp_path: Path
) -> None:
    text = _named("train.py").text
    assert text.count(USE) == 1
    (tmp_path / "train.py").write_text(text.replace(USE, line))
    told = run(command, tmp_path)
    if line == USE:
        assert_printed(_named("train.py"), told)
    assert _loss(told) == pytest.approx(one_device["jax" if '"jax"' in line else "torch"], rel=1e-5)
    assert re.search(r"up/kernel +\(16, 64\) +split on dim 1 over model +\(16, 32\) +2,048", told)
    assert re.search(r"down/kernel +\(64, 16\) +split on dim 0 over model +\(32, 16\) +2,048", told)
    # Where processes meet, they agree on the first weights; each line says what it is for.
    assert ("first weights" in told) == (command.startswith("unidist run") and '"jax"' not in line)
    total = re.search(r"total +([\d,]+) +([\d,.]+)$", told, re.MULTILINE)
    assert total is not None
    assert all(float(number.replace(",", "")) > 0 for number in total.groups())


def test_a_fresh_environment_installs_the_package_and_shows_the_demo(tmp_path: Path) -> None:
    """The README's first line, word for word. Without a network: what the package needs comes from this environment."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "unidist", checkout / "unidist", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "keras_unidist.py"):
        shutil.copy(ROOT / name, checkout / name)
    line = next(block.text.strip() for block in blocks(README) if ".venv" in block.text)
    env = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "false",  # pip reads the variable of an option "--no-..." the other way round
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": os.pathsep.join((path_with("sklearn"), sysconfig.get_paths()["purelib"])),
        "PATH": f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "COLUMNS": "100",
    }
    done = subprocess.run(
        ["bash", "-c", line], cwd=checkout, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successfully built keras-unidist" in done.stdout
    assert_demo(done.stdout)


def _loss(told: str) -> float:
    found = re.findall(r"loss (\d+\.\d+)$", told, re.MULTILINE)
    assert len(found) == 1, told
    return float(found[0])

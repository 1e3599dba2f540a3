"""A sixth adapter, by its registration alone, which docs/internals/adapters.md shows, in worlds of two processes.

It is found as one that is installed is: by the entry point in its distribution's metadata.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import unidist
from tests.docs.documents import ROOT, blocks, run
from tests.parity.compare import assert_same_logs, assert_same_values
from tests.parity.train import Result, Spec
from tests.parity.worlds import ALONE, DATA_2, MODEL_2, Setting
from unidist.backends import environment, registry
from unidist.backends.protocol import Array
from unidist.keras import backend_probe
from unidist.parity import spec as parity
from unidist.testing.conformance import ConformanceSuite
from unidist.testing.laws import World
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent / "sockets"
PAGE = "docs/internals/adapters.md"
SETTING = Setting("sockets-2", "torch", "sockets", 2, launcher="sockets")
# Alike for all processes here, so that they are forked from servers that others use too.
COMMON: dict[str, Any] = {
    "env": SETTING.world()._env,
    "preload": SETTING.world()._preload,
}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """The folders that it needs on the path: of its metadata, as pip writes it, and of its package."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("site")
    info = folder / "unidist_sockets-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [f"{name} = {value}\n" for name, value in project["entry-points"]["unidist.backends"].items()]
    (info / "entry_points.txt").write_text("[unidist.backends]\n" + "".join(points))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_LAUNCHERS", dict(environment.launchers()))
        for one in (HERE, folder):
            patch.syspath_prepend(str(one))
        yield [folder, HERE]


# the laws


def tensor(value: Array, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape).to(getattr(torch, dtype))


def array(x: torch.Tensor) -> Array:
    return np.asarray(x.detach().float() if x.dtype == torch.bfloat16 else x.detach())


def vjp(function: Callable[[Any], Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(given), given, y)
    return gradient


def world() -> World:
    return World(backend=unidist.use("sockets"), array=tensor, numpy=array, vjp=vjp, layout_pairs=7, layouts=8)


class TestSockets(ConformanceSuite):
    backend = "sockets"
    world = f"{__name__}:world"
    launcher = "sockets"
    processes = 2
    env: ClassVar = COMMON["env"]
    preload: ClassVar = COMMON["preload"]


# Keras


@pytest.fixture(scope="module")
def trained(installed: list[Path]) -> Iterator[ProcessWorld]:
    registry.find("sockets")  # its launcher is known from here on
    with SETTING.world() as processes:
        yield processes


@pytest.fixture(scope="module")
def alone() -> Iterator[ProcessWorld]:
    with ALONE["torch"].world() as process:
        yield process


@pytest.mark.parametrize("spec", [DATA_2, Spec("data", (("data", 2),), zero=3), MODEL_2], ids=lambda spec: spec.name)
def test_keras_models_train_as_on_one_device(spec: Spec, trained: ProcessWorld, alone: ProcessWorld) -> None:
    wanted: Result = alone.call("tests.parity.train:train", "mlp_ragged_adam", None)[0]
    for result in trained.call("tests.parity.train:train", "mlp_ragged_adam", spec):
        assert_same_values(result.start, wanted.start)
        assert_same_logs(result.logs, wanted.logs)
        assert_same_values(result.weights, wanted.weights)
        assert_same_values(result.evaluate, wanted.evaluate)
        assert_same_values(result.predict, wanted.predict)
        assert any(variable.is_sharded for variable in result.variables) == (spec != DATA_2)
        assert sum(sent for _, sent in result.traffic.values()) > 0


# what else goes by the entry


def test_it_is_listed_and_compared_as_the_others() -> None:
    found = unidist.backends()["sockets"]
    assert (found.installed, found.version, found.view) == (True, "0.1.0", "local")
    ((name, keras),) = parity.parse_backends("sockets")
    asked = parity.Spec(target="a.py:f", backend=name, keras=keras, mesh={"data": 2}, steps=1, initial=None, folder=".")
    assert (asked.name, asked.by_processes) == ("sockets", True)


def looked_at() -> Any:
    """What `unidist doctor` asks of each backend, in a process of its own."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        backend_probe.main("sockets")
    return json.loads(said.getvalue())


def test_the_doctor_asks_what_keras_is_to_it() -> None:
    with ProcessWorld(1, launcher=None, **COMMON) as process:
        (told,) = process.call(looked_at)
    assert told["devices"] == ["cpu:0"]
    assert told["keras"]["replaced"] > 40


def test_the_doctor_starts_a_world_of_it_by_its_job(
    installed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page says; `unidist run` starts its processes likewise."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (*map(str, installed), os.environ.get("PYTHONPATH"))))
    )
    (command,) = (block.text.strip() for block in blocks(PAGE) if block.language == "bash")
    told = run(command, tmp_path)
    assert "1 of 1 are right" in told
    assert "unidist-sockets" in told
    assert told.rstrip().endswith("nothing failed")


def test_the_page_shows_the_package_as_it_is() -> None:
    shown = [block.text for block in blocks(PAGE) if block.language in ("python", "toml")]
    project, entry, *parts, suite = shown
    assert _lines(project) == _lines((HERE / "pyproject.toml").read_text())
    assert _lines(entry) == _lines((HERE / "unidist_sockets" / "__init__.py").read_text())
    adapter = (HERE / "unidist_sockets" / "backend.py").read_text()
    assert len(parts) == 2
    for part in map(_lines, parts):
        at = _lines(adapter).index(part[0])
        assert _lines(adapter)[at : at + len(part)] == part
    here = _lines(Path(__file__).read_text())
    assert set(_lines(suite)) <= set(here)
    assert len(adapter.splitlines()) < 250, f"the adapter is longer than {ROOT / PAGE} says"


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]

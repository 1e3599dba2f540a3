"""The `unidist` command: what it takes, what it passes on, how errors come out."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unidist
import unidist.launch
from tests.visible import WITH_TENSORFLOW
from unidist import cli
from unidist.backends import registry
from unidist.backends.protocol import ALL_DTYPES, Capabilities
from unidist.launch import Request


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('trained')\n")
    return str(path)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What `unidist run` asks the launcher for; nothing is started."""
    seen: list[Request] = []

    def run(request: Request) -> int:
        seen.append(request)
        return 7

    monkeypatch.setattr(unidist.launch, "run", run)
    monkeypatch.delenv("UNIDIST_BACKEND", raising=False)
    return seen


def test_run_passes_its_options_and_the_scripts_arguments_on(requests: list[Request], script: str) -> None:
    options = ["-n", "4", "--backend", "jax", "--nodes", "2", "--node-rank", "1", "--address", "node0:1234"]
    assert (
        cli.main(
            ["run", *options, "--devices-per-process", "2", script, "--epochs", "3", "-n", "9", "--", "--nodes", "x"]
        )
        == 7
    )
    assert requests == [
        Request(
            backend="jax",
            command=(script, "--epochs", "3", "-n", "9", "--", "--nodes", "x"),
            processes=4,
            nodes=2,
            node_rank=1,
            address="node0:1234",
            devices_per_process=2,
        )
    ]


def test_run_takes_a_module(requests: list[Request]) -> None:
    assert cli.main(["run", "-n", "2", "-m", "json.tool", "-m", "x"]) == 7
    assert requests[0].command == ("-m", "json.tool", "-m", "x")
    assert requests[0].backend == "torch"


def test_the_backend_is_that_of_the_environment(
    requests: list[Request], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIDIST_BACKEND", "jax")
    cli.main(["run", script])
    cli.main(["run", "--backend", "torch", script])
    assert [request.backend for request in requests] == ["jax", "torch"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (["-n", "0"], "LaunchError", "processes (-n) must be 1 or more, got 0"),
        (["-n", "all"], "LaunchError", "-n (--processes) must be a number or 'gpu', got 'all'"),
        (["--nodes", "2"], "LaunchError", "--address host:port"),
        (["--nodes", "2", "--node-rank", "2", "--address", "a:1"], "LaunchError", "node rank 2 is not one of 0..1"),
        (["--address", "nowhere"], "LaunchError", "'nowhere' must be host:port"),
        (["--address", "nowhere:99999"], "LaunchError", "port of 1..65535"),
        (["--grace", "-1"], "LaunchError", "grace must be 0"),
        (["--devices-per-process", "2"], "LaunchError", "torch has one device a process"),
        (["--devices-per-process", "0"], "LaunchError", "devices per process must be 1 or more"),
        (["--backend", "horovod", "--devices-per-process", "2"], "LaunchError", "horovod has one device a process"),
        (["--backend", "sim"], "CapabilityError", "in one process"),
        (["--backend", "toch"], "BackendNotAvailableError", "unknown backend 'toch'"),
    ],
)
def test_what_cannot_be_run_is_exit_code_2_and_one_paragraph(
    arguments: list[str], error: str, text: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *arguments, script]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"unidist: {error}: ")
    assert text in said.err
    assert "Traceback" not in said.err


def test_an_option_that_is_none_is_refused_with_the_one_that_is_meant(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "--procesess", "2", script])
    said = capsys.readouterr().err
    assert said.startswith("usage: unidist run ")
    assert "unrecognized arguments: --procesess; is it --processes?" in said
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demos"])
    assert "no command 'demos'; is it 'demo'?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run"])
    assert "required: SCRIPT\n" in capsys.readouterr().err


def test_a_script_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "no_such.py"]) == 2
    assert "no such script: 'no_such.py'" in capsys.readouterr().err


def test_a_module_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], requests: list[Request]
) -> None:
    """It is looked for where `python -m` would, and none of it is imported; what may be there is left to Python."""
    monkeypatch.chdir(tmp_path)
    for folder in ("found", "found/with_main", "elsewhere/found"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text("raise AssertionError('imported')")
    for name in ("found/train.py", "found/with_main/__main__.py", "elsewhere/found/other.py"):
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    for there in ("found.train", "found.with_main", "found.other", "os.path", "json.tool"):
        assert cli.main(["run", "-m", there]) == 7
    for module, why in {
        "nosuchmod": "no such module: 'nosuchmod' (looked from ",
        "found.trian": "no such module: 'found.trian'",
        "found": "'found' is a package without a __main__.py",
        "train.py": "-m train.py: that is a file; leave out -m, or write -m train",
    }.items():
        assert cli.main(["run", "-n", "3", "-m", module]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert why in said


def test_a_backend_that_is_not_installed_says_how_to_get_it(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        registry._entries,
        "jax",
        replace(registry.entry("jax"), requires=("no_such_module",)),
    )
    assert cli.main(["run", "--backend", "jax", script]) == 2
    said = capsys.readouterr().err
    assert said.startswith("unidist: BackendNotAvailableError: backend 'jax' needs no_such_module")
    assert 'pip install "keras>=3.15,<3.17" "jax>=0.10"' in said


def test_backends_tells_what_is_there_what_it_can_do_and_how_to_get_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    can = Capabilities(
        view="global",
        uneven="padded",
        dtypes=ALL_DTYPES - {"bool"},
        reduce_ops=frozenset({"sum", "mean"}),
        processes=False,
    )
    infos: dict[str, Any] = {
        "near": registry.BackendInfo(
            name="near", installed=True, version="1.2", view="global", capabilities=can, hint="never shown"
        ),
        "far": registry.BackendInfo(
            name="far", installed=False, version=None, view=None, capabilities=None, hint="pip install far"
        ),
    }
    monkeypatch.setattr(registry, "backends", lambda: infos)
    assert cli.main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["backend", "installed", "version", "view", "can", "do"]
    assert lines[1].split()[:4] == ["near", "yes", "1.2", "global"]
    for said in ("one process", "uneven shards padded", "differentiable", "no bool", "no max, min, prod reduction"):
        assert said in lines[1]
    assert lines[2].split() == ["far", "no", "-", "-", "-"]
    assert lines[3:] == ["", "far: pip install far"]


def test_backends_for_real_lists_every_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:] if line]
    assert set(registry.names()) <= set(listed)


# The command in an environment like this one, in which a package cannot be found.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == sys.argv[1] else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from unidist import cli
sys.exit(cli.main(["backends"]))
"""


@pytest.mark.parametrize("missing", ["horovod", "tensorflow"])
def test_backends_tells_of_one_that_is_not_installed(missing: str) -> None:
    command, env = [sys.executable, "-c", WITHOUT, missing], {**os.environ, **WITH_TENSORFLOW}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    table, _, rest = done.stdout.partition("\n\n")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[1:]}
    assert set(rows) == {"sim", "torch", "jax", "tensorflow", "horovod"}
    assert rows[missing] == ["no", "-", "-", "-"]
    told = {line.partition(":")[0]: line for line in rest.splitlines() if line}
    assert f"backend {missing!r} needs {missing}: " in told[missing]
    assert "install" in told[missing]
    for name in set(rows) - {missing}:
        installed = name == "sim" or name in importlib.metadata.packages_distributions()
        assert rows[name][0] == ("yes" if installed else "no"), name
        assert (name in told) == (not installed)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"unidist {unidist.__version__}\n"


def test_without_a_command_all_of_them_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert all(f"\n    {command.name}" in said.err for command in cli.commands())


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unidist", "run", "none.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "no such script" in done.stderr

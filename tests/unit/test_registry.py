"""The registry and the session: choosing, joining, third parties; every error by its text."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unidist
from unidist import session
from unidist.backends import environment, global_state, on_keras, registry
from unidist.backends.environment import detect, first_host
from unidist.backends.protocol import Capabilities, Cluster, DistributionBackend
from unidist.backends.sim.backend import SimBackend
from unidist.errors import BackendMismatchError, BackendNotAvailableError, CapabilityError, MeshError
from unidist.launch.request import Request
from unidist.launch.run import _environ

LAUNCHERS = (
    "RANK WORLD_SIZE HOROVOD_RANK HOROVOD_SIZE JAX_COORDINATOR_ADDRESS SLURM_NTASKS UNIDIST_BACKEND KERAS_BACKEND"
)


class World(SimBackend):
    """A backend that can join a world of processes and remembers what it was given."""

    name = "worldly"
    capabilities = Capabilities(view="local", differentiable=False)

    def __init__(self, devices: Any = None, **options: Any) -> None:
        super().__init__(devices)
        self.options = options
        self.joined: list[Cluster] = []
        self.left = 0

    def initialize(self, cluster: Cluster) -> None:
        self.joined.append(cluster)

    def shutdown(self) -> None:
        self.left += 1

    def process_count(self) -> int:
        return 4

    def process_index(self) -> int:
        return 2


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, no hook into Keras's arrival, a registry of one's own."""
    for name in LAUNCHERS.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KERAS_HOME", "/nowhere")
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(session.keras_import_hook, "when_keras_arrives", lambda: None)  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    with registry.isolated():
        yield


@pytest.fixture
def worldly() -> None:
    unidist.register("worldly", f"{__name__}:World")


# Choosing ----------------------------------------------------------------------------------------------------------


def test_an_unknown_backend_is_told_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        BackendNotAvailableError, match=r"unknown backend 'mpi': one of \[.*'jax', 'sim', 'tensorflow', 'torch'"
    ):
        unidist.use("mpi")
    monkeypatch.setenv("UNIDIST_BACKEND", "mpi")
    with pytest.raises(BackendNotAvailableError, match=r"unknown backend 'mpi' \(UNIDIST_BACKEND\)"):
        unidist.use()


def test_what_is_not_installed_is_told_with_the_hint() -> None:
    unidist.register("far", "far.away:Backend", hint="pip install far", requires=("no_such_module_far", "numpy"))
    with pytest.raises(BackendNotAvailableError, match=r"backend 'far' needs no_such_module_far: pip install far"):
        unidist.use("far")
    unidist.register("gone", "no_such_module_far:Backend", hint="pip install far")
    with pytest.raises(BackendNotAvailableError, match=r"no_such_module_far:Backend cannot be imported .* pip install"):
        unidist.use("gone")
    unidist.register("shallow", "unidist.errors:Missing")
    with pytest.raises(BackendNotAvailableError, match="has no attribute 'Missing'"):
        unidist.use("shallow")
    with pytest.raises(BackendNotAvailableError, match=r"target 'far.away' must be 'package.module:Class'"):
        unidist.register("far", "far.away")
    with pytest.raises(
        BackendNotAvailableError, match=r"register\('far'\): an Entry has no field colour; it has hint, "
    ):
        unidist.register("far", "far.away:Backend", colour="red")


def test_nothing_in_use_is_told() -> None:
    with pytest.raises(BackendNotAvailableError, match=r"no backend is in use: call unidist\.use"):
        registry.current()


def test_a_choice_can_be_changed_and_the_one_before_is_left(worldly: None) -> None:
    first = unidist.use("worldly", devices=3, colour="red")
    assert isinstance(first, World)
    assert (first.options, unidist.list_devices()) == ({"colour": "red"}, ["cpu:0", "cpu:1", "cpu:2"])
    second = unidist.use("sim", devices=["cpu:0", "gpu:0"])
    assert first.left == 1
    assert unidist.backend() is second
    assert (unidist.list_devices("gpu"), unidist.process_count(), unidist.process_index()) == (["gpu:0"], 1, 0)
    assert unidist.Mesh({"x": -1}).size == 2


def test_without_a_name_one_line_says_what_was_chosen_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, worldly: None
) -> None:
    assert unidist.use().name == "sim"
    out, err = capsys.readouterr()
    assert out == ""
    keras = "Keras on 'torch' (the first installed of torch, jax, tensorflow)"
    assert err == f"unidist: using 'sim' (no backend was named and no launcher started this process), {keras}\n"
    monkeypatch.setenv("UNIDIST_BACKEND", "worldly")
    assert unidist.use().name == "worldly"
    assert capsys.readouterr().err == "unidist: using 'worldly' (UNIDIST_BACKEND)\n"
    unidist.use("sim")
    assert capsys.readouterr().err == "", "KERAS_BACKEND is set by now"
    monkeypatch.delenv("KERAS_BACKEND")
    unidist.use("sim")
    assert capsys.readouterr().err == f"unidist: using 'sim' (as asked), {keras}\n"


def test_the_line_comes_once_in_a_launch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(environment.RESTARTS, "0")
    monkeypatch.setenv("UNIDIST_BACKEND", "several")
    unidist.register("several", f"{__name__}:World")
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        unidist.use()
        said.append(capsys.readouterr().err)
    assert said == ["unidist: using 'several' (unidist run)\n", ""]


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "KERAS_BACKEND": "jax"}, "jax"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "torch"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "horovod"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "jax"),
        ({"RANK": "0", "WORLD_SIZE": "2", "UNIDIST_BACKEND": "worldly"}, "worldly"),
        ({}, "sim"),
        ({"RANK": "0", "WORLD_SIZE": "2", "KERAS_HOME": "jax"}, "jax"),
    ],
    ids=str,
)
def test_the_launchers_environment_chooses(
    environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "KERAS_HOME" in environment:
        (tmp_path / "keras.json").write_text(f'{{"backend": "{environment["KERAS_HOME"]}"}}')
        environment = {**environment, "KERAS_HOME": str(tmp_path)}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert registry.default_name()[0] == name
    assert registry.name_for_processes() == environment.get("UNIDIST_BACKEND", on_keras.choice().name)


def test_the_functions_keep_their_names_when_the_modules_are_imported() -> None:
    import unidist.backends.registry
    import unidist.ledger

    assert "sim" in unidist.backends()
    with unidist.ledger() as book:
        assert book.events == []


# Keras -------------------------------------------------------------------------------------------------------------


def keras_on(backend: str) -> ModuleType:
    keras = ModuleType("keras")
    keras.config = SimpleNamespace(backend=lambda: backend)  # type: ignore[attr-defined]
    return keras


def test_keras_on_another_backend_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", keras_on("openvino"))
    with pytest.raises(BackendMismatchError, match=r"needs Keras on torch, jax or tensorflow, .* on 'openvino'.*KERAS"):
        unidist.use("sim")
    with pytest.raises(BackendNotAvailableError):
        registry.current()
    monkeypatch.setitem(sys.modules, "keras", keras_on("jax"))
    assert unidist.use("sim").name == "sim"


class Serving(World):
    """Runs with Keras on two backends."""

    def __init__(self, devices: Any = None, framework: str = "") -> None:
        super().__init__(devices)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where Keras's own configuration is; both backends are installed."""
    serving = {"keras_backends": ("torch", "jax"), "keras_option": "framework"}
    unidist.register("serving", f"{__name__}:Serving", **serving)
    monkeypatch.setattr(on_keras.importlib.util, "find_spec", lambda name: object())  # type: ignore[attr-defined]
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    return tmp_path / "keras.json"


def chosen(name: str | None, **options: Any) -> str | None:
    """What Keras will run on."""
    unidist.use(name, **options)
    found = os.environ.get("KERAS_BACKEND")
    os.environ.pop("KERAS_BACKEND", None)
    return found


def test_keras_own_configuration_chooses_among_those_that_serve(
    served: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen("serving") == "torch"
    served.write_text('{"backend": "jax"}')
    assert chosen("serving") == "jax"
    assert capsys.readouterr().err.splitlines() == [
        "unidist: using 'serving' (as asked), Keras on 'torch' (the first installed of torch, jax)",
        "unidist: using 'serving' (as asked), Keras on 'jax' (keras.json)",
    ]
    assert chosen("serving", framework="torch") == "torch"
    assert chosen("serving", framework="mxnet") == "jax", "the adapter may have other frameworks too"
    served.write_text('{"backend": "tensorflow"}')
    assert chosen("serving") == "torch"
    served.write_text("no JSON")
    assert chosen("serving") == "torch"


def test_one_order_chooses_for_use_for_the_simulator_and_for_the_launcher(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras writes a keras.json that names TensorFlow at its first import, on whatever backend that is."""

    def all_three() -> set[str | None]:
        run = _environ(Request(backend=registry.name_for_processes(), command=("-m", "this")))
        assert run["UNIDIST_BACKEND"] == run["KERAS_BACKEND"]
        return {chosen("sim"), chosen(None), run["KERAS_BACKEND"]}

    assert all_three() == {"torch"}
    own = {"floatx": "float32", "epsilon": 1e-07, "backend": "tensorflow", "image_data_format": "channels_last"}
    served.write_text(json.dumps(own))
    assert all_three() == {"torch"}
    served.write_text(json.dumps(own | {"floatx": "float16"}))
    assert all_three() == {"tensorflow"}
    served.write_text('{"backend": "tensorflow"}')
    assert all_three() == {"tensorflow"}
    monkeypatch.setattr(on_keras, "_is_installed", lambda name: name == "jax")
    assert all_three() == {"jax"}


def test_what_the_shell_says_of_keras_is_taken_or_refused(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert chosen("serving") == "jax"
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    with pytest.raises(BackendMismatchError, match=r"needs Keras on torch or jax, but KERAS_BACKEND is 'tensorflow'"):
        unidist.use("serving")
    assert chosen("serving", framework="jax") == "jax", "the framework that was asked for is the only one"


def test_keras_is_told_its_backend_before_an_adapter_imports_it(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorFlow does. Whatever the shell or Keras's own configuration says."""
    unidist.register("importing", f"{__name__}:Serving", keras_backends=("jax",))
    found, load = [], registry.load

    def loading(name: str) -> Any:
        found.append(os.environ.get("KERAS_BACKEND"))
        return load(name)

    monkeypatch.setattr(registry, "load", loading)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    unidist.use("importing")
    monkeypatch.delenv("KERAS_BACKEND")
    served.write_text('{"backend": "torch"}')
    unidist.use("importing")
    assert set(found) == {"jax"}
    assert registry.entry("tensorflow").keras_backends == ("tensorflow",)


# Joining -----------------------------------------------------------------------------------------------------------


def test_a_world_is_joined_once(worldly: None) -> None:
    adapter: Any = unidist.use("worldly")
    unidist.initialize("host:1", 4, 2, timeout=7)
    assert adapter.joined == [Cluster(address="host:1", process_count=4, process_index=2, timeout=7)]
    with pytest.raises(BackendMismatchError, match=r"initialize was called a second time: .* of 4 already; .*shutdown"):
        unidist.initialize("host:1", 4, 2)
    unidist.shutdown()
    unidist.initialize("host:2", 4, 2)
    assert len(adapter.joined) == 2


def test_under_a_launcher_the_world_is_joined_by_itself(worldly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    adapter: Any = unidist.use("worldly")
    assert adapter.joined == [Cluster()]
    with pytest.raises(BackendMismatchError, match=r"asks for process 1 of 4, but the launcher .* as process 2 of 4"):
        unidist.initialize("host:1", 4, 1)
    with pytest.raises(BackendMismatchError, match="asks for process None of 8"):
        unidist.initialize(process_count=8)
    unidist.initialize("host:1", 4, 2)
    assert adapter.joined == [Cluster()]
    with pytest.raises(BackendMismatchError, match="second time"):
        unidist.initialize()
    adapter = registry.use("worldly", cluster=Cluster(timeout=7.0))
    assert isinstance(adapter, World)
    assert adapter.joined == [Cluster(timeout=7.0)]
    unidist.initialize()


@pytest.mark.parametrize("seconds", ["x", "60", 0, -1, float("nan"), float("inf"), [1.0]])
@pytest.mark.parametrize("chosen", [False, True])
def test_a_timeout_is_a_number_of_seconds(worldly: None, seconds: Any, chosen: bool) -> None:
    if chosen:
        unidist.use("worldly")
    with pytest.raises(BackendNotAvailableError, match=r"timeout=.*: give seconds above 0, as timeout=60"):
        unidist.initialize("host:1", 4, 2, timeout=seconds)
    assert not registry.has_joined()


class Patient(World):
    """Can change its timeout."""

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds


def test_a_timeout_holds_under_a_launcher(worldly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    unidist.register("patient", f"{__name__}:Patient")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("UNIDIST_TIMEOUT", "9.5")
    adapter: Any = unidist.use("patient")
    assert adapter.joined == [Cluster(timeout=9.5)]
    unidist.initialize(timeout=7)
    assert adapter.timeout == 7
    monkeypatch.setenv("UNIDIST_BACKEND", "worldly")
    global_state._set(None, "no")
    unidist.initialize(timeout=6)  # it comes first, and chooses the backend
    assert [cluster.timeout for cluster in unidist.backend().joined] == [6]  # type: ignore[attr-defined]
    unidist.use("worldly")
    with pytest.raises(CapabilityError, match=r"worldly cannot change its timeout .* UNIDIST_TIMEOUT=5"):
        unidist.initialize(timeout=5)
    for said in ("soon", "0", "nan", "inf"):
        monkeypatch.setenv("UNIDIST_TIMEOUT", said)
        with pytest.raises(BackendNotAvailableError, match=f"UNIDIST_TIMEOUT='{said}', which should be seconds"):
            unidist.use("worldly")


def test_the_simulator_refuses_to_be_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    unidist.use("sim")
    with pytest.raises(
        BackendMismatchError, match=r"sim runs all its devices in one process, .* asked for 2: .*python"
    ):
        unidist.initialize("host:1", 2, 0)
    unidist.initialize()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(BackendMismatchError, match="asked for 3"):
        unidist.use("sim")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert unidist.use("sim").name == "sim"


@pytest.mark.parametrize("devices", [0, []], ids=str)
def test_the_simulator_needs_devices(devices: Any) -> None:
    with pytest.raises(MeshError, match=r"at least one device: use\('sim', devices=4\)"):
        unidist.use("sim", devices=devices)
    with pytest.raises(MeshError, match="named twice"):
        unidist.use("sim", devices=["cpu:0", "cpu:0"])


@pytest.mark.parametrize("devices", [2.5, True, -1, "cpu:0", ["cpu:0", 1], {"cpu:0"}], ids=str)
def test_devices_are_a_number_or_names(devices: Any) -> None:
    with pytest.raises(MeshError, match=r"use\('sim', devices=.*\): give the number of devices, as devices=4, or"):
        unidist.use("sim", devices=devices)
    assert len(unidist.use("sim", devices=np.int64(3)).list_devices()) == 3  # type: ignore[arg-type]


# Third parties -----------------------------------------------------------------------------------------------------

THEIRS = """
from unidist.backends.sim.backend import SimBackend

class TheirBackend(SimBackend):
    name = "theirs"
"""
THEIR_ENTRY = """
from unidist.backends.environment import Launcher
from unidist.backends.registry import Entry

ENTRY = Entry(
    target="their_backend:TheirBackend",
    requires=("numpy",),
    keras_backends=("jax",),
    virtual=True,
    launcher=Launcher(name="theirrun", count="THEIR_SIZE", index="THEIR_RANK"),
)
"""


@pytest.fixture
def their_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution installed beside others: a module, its metadata and two entry points."""
    (tmp_path / "their_backend.py").write_text(THEIRS)
    (tmp_path / "their_entry.py").write_text(THEIR_ENTRY)
    monkeypatch.setattr(environment, "_LAUNCHERS", dict(environment.launchers()))
    info = tmp_path / "their_package-3.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 3.2\n")
    (info / "entry_points.txt").write_text(
        "[unidist.backends]\ntheirs = their_backend:TheirBackend\nbroken = their_backend:Nothing\n"
        "sim = their_backend:TheirBackend\ntold = their_entry:ENTRY\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_entry_point_is_a_backend_and_hides_none_of_ours(their_distribution: None) -> None:
    assert unidist.use("theirs", devices=2).name == "theirs"
    assert unidist.use("sim").name == "sim"
    infos = unidist.backends()
    assert (infos["theirs"].installed, infos["theirs"].version, infos["theirs"].view) == (True, "3.2", "local")
    assert not infos["broken"].installed
    assert "pip install their-package" in infos["broken"].hint


def test_an_entry_point_may_name_an_entry_which_is_read_without_the_adapter(
    their_distribution: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("THEIR_SIZE", "1")
    monkeypatch.setenv("THEIR_RANK", "0")
    monkeypatch.delitem(sys.modules, "their_backend", raising=False)
    assert registry.default_name() == ("told", "the environment of theirrun")
    assert "their_backend" not in sys.modules
    assert "THEIR_RANK" not in environment.without_launcher(os.environ)
    told = registry.entry("told")
    assert (told.hint, told.distribution) == ("pip install their-package", "their-package")
    assert set(registry.distributions()) == {"torch", "jax", "tensorflow", "horovod", "their-package"}
    assert unidist.use("told", devices=2).name == "theirs"
    assert (os.environ["KERAS_BACKEND"], registry.in_use().virtual) == ("jax", True)
    unidist.use("sim", devices=2)
    assert registry.in_use() == registry.entry("sim")


def test_what_is_registered_is_listed_with_its_version(worldly: None) -> None:
    unidist.register("far", "far.away:Backend", hint="pip install far", requires=("no_such_module_far",))
    unidist.register("near", f"{__name__}:World", requires=("_pytest",))
    infos = unidist.backends()
    assert infos["worldly"].installed
    assert infos["worldly"].version is None
    assert infos["worldly"].capabilities == World.capabilities
    assert infos["near"].version == pytest.__version__, "the distribution that installs the module"
    assert (infos["far"].installed, infos["far"].version, infos["far"].capabilities) == (False, None, None)
    assert "pip install far" in infos["far"].hint
    assert infos["sim"].installed


# Launchers ---------------------------------------------------------------------------------------------------------


def test_the_first_host_of_slurms_lists() -> None:
    assert first_host("gpu[003-007,9],x1") == "gpu003"
    assert first_host("a1,b2") == "a1"
    assert first_host("node-[7,9]-ib") == "node-7-ib"


def test_slurm_gives_an_address() -> None:
    env = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "n[01-02]"}
    launch = detect(env)
    assert launch is not None
    assert (launch.launcher, launch.process_count, launch.process_index) == ("slurm", 4, 3)
    assert launch.address == "n01:61517"
    assert detect({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert detect({}) is None


# The house ---------------------------------------------------------------------------------------------------------


def test_every_built_in_adapter_has_a_conformance_class() -> None:
    """A class under tests/ whose base is ConformanceSuite and whose `backend` is the adapter's name."""
    root, found = Path(__file__).parent.parent, set()
    for path in root.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith("ConformanceSuite") for b in node.bases):
                found |= {
                    ast.literal_eval(line.value)
                    for line in node.body
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "backend"
                }
    missing = set(BUILT_IN) - found
    assert not missing, f"no subclass of ConformanceSuite with backend = {sorted(missing)} under {root.name}/"


BUILT_IN = tuple(registry._entries)


def test_the_adapters_are_found_where_the_registry_says() -> None:
    for name in BUILT_IN:
        module, _, attribute = registry._entries[name].target.partition(":")
        path = Path(unidist.__file__).parent.parent / Path(*module.split(".")).with_suffix(".py")
        assert f"class {attribute}" in path.read_text(), f"{name}: {path} has no class {attribute}"


def test_the_simulator_has_every_member_of_the_protocol() -> None:
    assert isinstance(SimBackend(2), DistributionBackend)


def test_importing_unidist_imports_no_framework_and_no_keras() -> None:
    program = (
        "import sys, unidist, unidist.array, unidist.backends.registry, unidist.testing.laws\n"
        "unidist.use('sim', devices=2)\n"
        "found = {m.partition('.')[0] for m in sys.modules} & "
        "{'keras', 'torch', 'jax', 'tensorflow', 'horovod', 'pytest', 'hypothesis'}\n"
        "assert not found, found"
    )
    env = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr


def test_every_adapter_that_comes_with_the_package_is_held_to_the_laws() -> None:
    held = set()
    for path in Path(__file__).parents[1].glob("*/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "ConformanceSuite" in {getattr(b, "id", "") for b in node.bases}:
                held |= {
                    item.value.value
                    for item in node.body
                    if isinstance(item, ast.Assign)
                    and isinstance(item.value, ast.Constant)
                    and ast.unparse(item.targets[0]) == "backend"
                }
    own = {name for name in registry.names() if registry.entry(name).target.startswith("unidist.")}
    assert own <= held, f"no ConformanceSuite for {own - held}"

"""The package as users get it: light to import, complete in its wheel, its ranges kept by the pinned set."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import unidist
from unidist import names
from unidist.backends import installed, registry
from unidist.doctor import versions

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("keras", "torch", "jax", "jaxlib", "tensorflow", "horovod", "sklearn", "rich")


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    program = (
        "import sys, time, numpy\n"
        "before = time.perf_counter()\n"
        "import unidist\n"
        "print(time.perf_counter() - before, *sorted(sys.modules))"
    )
    runs = [python(program).split() for _ in range(3)]
    assert min(float(run[0]) for run in runs) < 0.15
    assert not {*HEAVY, "psutil"} & set(runs[0][1:])


def test_choosing_a_backend_and_asking_for_names_imports_no_framework_and_no_keras() -> None:
    program = (
        "import json, sys, unidist, unidist.cli, unidist.launch\nfrom unidist import names\n"
        "light = [n for n, home in names.WHERE.items() if not home.startswith('unidist.keras')]\n"
        "values = [getattr(unidist, n) for n in light]\n"
        "unidist.Mesh({'data': 4}, devices=range(4))\n"
        "print(json.dumps([len(values), sorted(sys.modules)]))"
    )
    count, modules = json.loads(python(program))
    assert count > 20
    assert not set(HEAVY) & set(modules)


def test_modules_beside_those_of_keras_import_no_keras() -> None:
    """So that `unidist demo` chooses Keras's framework before Keras reads its own settings."""
    program = (
        "import importlib, pkgutil, sys, unidist\n"
        "apart = ('unidist.keras.', 'unidist.backends.', 'unidist.testing.', 'unidist.__main__')\n"
        "for found in pkgutil.walk_packages(unidist.__path__, 'unidist.'):\n"
        "    if not f'{found.name}.'.startswith(apart):\n"
        "        importlib.import_module(found.name)\n"
        "        assert 'keras' not in sys.modules, found.name\n"
        "print(sum(name.startswith('unidist.') for name in sys.modules))"
    )
    assert int(python(program)) > 100


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    for name, home in names.WHERE.items():
        if not home.startswith("unidist.keras"):
            found, said = getattr(unidist, name), getattr(importlib.import_module(home), name)
            # A module that has a public function's name is called in its place.
            assert found is said or (isinstance(found, ModuleType) and callable(found)), name


def test_type_checkers_see_the_same_names_as_users() -> None:
    tree = ast.parse((ROOT / "unidist" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: (home, name) for name, home in names.WHERE.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = unidist.paralelize


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "keras_unidist.py"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "unidist", source / "unidist", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "unit", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(target)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return zipfile.Path(next(target.glob("*.whl")))


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: zipfile.Path) -> None:
    held = {name for name in wheel.root.namelist() if not name.endswith("/")}
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "unidist").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in held if ".dist-info/" not in name} == {*package, "keras_unidist.py"}
    assert "unidist/py.typed" in package


def test_the_wheel_says_what_it_is(wheel: zipfile.Path) -> None:
    info = next(path for path in wheel.iterdir() if path.name.endswith(".dist-info"))
    metadata = message_from_bytes((info / "METADATA").read_bytes())
    assert metadata["Name"] == "keras-unidist"
    assert metadata["Version"] == unidist.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    installed = {"torch", "jax", "tensorflow", "horovod", "remote", "demo", "dev"}
    assert set(metadata.get_all("Provides-Extra", [])) == installed
    assert "unidist = unidist.cli:main" in (info / "entry_points.txt").read_text()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    plain = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert [Requirement(r).name for r in plain] == ["google-crc32c", "numpy", "psutil", "rich", "safetensors"]


def pins() -> dict[str, str]:
    lines = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_the_pinned_set_is_within_the_ranges(extra: str) -> None:
    known = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins().items()}
    for text in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
        requirement = Requirement(text)
        assert "==" not in text, "ranges in pyproject.toml, pins in ci/constraints.txt"
        if requirement.name == "horovod":  # source only: built apart
            continue
        assert Version(known[requirement.name.lower()]) in requirement.specifier


def test_what_a_backend_requires_is_what_its_extra_installs() -> None:
    asked = {name: tuple(texts) for name, texts in PROJECT["optional-dependencies"].items()}
    assert {**installed.EXTRAS, "dev": asked["dev"]} == asked
    for name in registry.names():
        entry = registry.entry(name)
        for module in entry.requires:
            assert module in {Requirement(text).name for text in asked[name]}
            if name != "horovod":  # source only: the hint says how it is built
                assert entry.hint == installed.install(name)


def test_nothing_advises_to_install_a_package_that_is_on_no_index() -> None:
    """Until there is a release, anybody could take the name: a command may name a folder, or an address, alone."""
    advises = re.compile(r"pip install\W+(-\S+ )*keras[-_]unidist(?!\[\w+\] @ git\+)")
    said = [*(ROOT / "unidist").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert [str(path) for path in said if advises.search(path.read_text())] == []


# the other package of this name ---------------------------------------------------------------------------------------


OTHER = {
    "unidist/__init__.py": "WHO = 'modin'\n",
    "unidist/core/__init__.py": "",
    "unidist-0.7.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: unidist\nVersion: 0.7.2\n",
}


def _installed(wheel: zipfile.Path, folder: Path, *, first: bool, other: bool = True) -> None:
    """Both into one folder, one after the other, each over what is there; by pip they would be so."""

    def ours() -> None:
        with zipfile.ZipFile(wheel.root.filename) as archive:
            archive.extractall(folder)

    def theirs() -> None:
        for name, text in OTHER.items() if other else ():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    for install in (ours, theirs) if first else (theirs, ours):
        install()


def _runs(folder: Path, program: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(folder), **env}
    return subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environ, cwd=folder
    )


@pytest.mark.parametrize("first", [True, False], ids=["ours first", "theirs first"])
def test_another_package_of_this_name(first: bool, wheel: zipfile.Path, tmp_path: Path) -> None:
    _installed(wheel, tmp_path, first=first)
    use = "unidist.use('sim', devices=2); print(unidist.Mesh({'data': -1}).size, unidist.__version__, unidist.__file__)"
    done = _runs(tmp_path, f"import keras_unidist as unidist; {use}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", unidist.__version__, str(tmp_path / "keras_unidist.py")]
    said = "keras-unidist (Keras 3 models on many devices) and modin's unidist 0.7.2 are both installed in"
    assert done.stderr.count(said) == 1
    assert "pip uninstall unidist keras-unidist" in done.stderr
    both = _runs(tmp_path, "import unidist; print(getattr(unidist, 'WHO', 'ours'))")
    assert both.stdout.split() == (["modin"] if first else ["ours"])
    assert (said in both.stderr) == (not first)
    after = _runs(tmp_path, "import unidist; import keras_unidist")
    assert (after.returncode, "modin's unidist is imported already" in after.stderr) == (int(first), first)


def test_one_package_of_this_name(wheel: zipfile.Path, tmp_path: Path) -> None:
    _installed(wheel, tmp_path, first=True, other=False)
    same = "keras_unidist.Mesh is unidist.Mesh, dir(keras_unidist) == dir(unidist), 'keras' in sys.modules"
    done = _runs(tmp_path, f"import sys, unidist, keras_unidist; print({same})")
    assert (done.stdout.split(), done.stderr) == (["True", "True", "False"], "")


def test_the_doctor_and_a_backend_of_the_other_package(wheel: zipfile.Path, tmp_path: Path) -> None:
    _installed(wheel, tmp_path, first=False)
    (check,) = versions.beside(tmp_path)
    assert (check.status, "modin's unidist 0.7.2" in check.found) == ("failed", True)
    assert versions.beside(tmp_path / "unidist") == []
    done = _runs(tmp_path, "import unidist; unidist.use()", UNIDIST_BACKEND="Ray")
    assert "unknown backend 'Ray'" in done.stderr
    assert "is a backend of modin's unidist, another package that reads UNIDIST_BACKEND too: unset it" in done.stderr

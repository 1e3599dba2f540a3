"""The examples of docstrings run as they stand; every public name has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import unidist
from tests import preloaded
from tests.visible import OF_KERAS
from unidist.names import WHERE
from unidist.testing.processes import ProcessWorld

PACKAGE = Path(unidist.__file__).parent
# What the modules of a folder import.
KERAS = {"keras/jax": "jax", "keras/tensorflow": "tensorflow", "keras/tensorflow_horovod": "tensorflow"}


def _files() -> list[str]:
    """Those of the package with an example in them."""
    return sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if ">>> " in p.read_text())


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, ProcessWorld]]:
    """A process for each backend of Keras."""
    found = {
        name: ProcessWorld(1, launcher=None, env=OF_KERAS[name], preload=preloaded.KERAS[name])
        for name in ("torch", *KERAS.values())
    }
    yield found
    for world in found.values():
        world.close()


@pytest.mark.processes
@pytest.mark.parametrize("file", _files())
def test_the_examples_of_a_module_run(processes: dict[str, ProcessWorld], file: str) -> None:
    keras = next((name for folder, name in KERAS.items() if file.startswith(folder)), "torch")
    module = "unidist." + file.removesuffix(".py").replace("/", ".")
    count, failures = processes[keras].call("tests.docs.docstrings:run", module)[0]
    assert count > 0
    assert not failures, failures


@pytest.mark.parametrize("name", sorted(set(unidist.__all__) - {"__version__"}))
def test_a_public_name_has_an_example(name: str) -> None:
    """Read from the source: importing it would bring Keras into this process."""
    file = PACKAGE.joinpath(*WHERE[name].split(".")[1:])
    source = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    docs = _docstrings(source)
    for imported in () if name in docs else source.parent.glob("*.py"):
        docs |= _docstrings(imported)
    assert ">>> " in docs[name]


def test_each_error_has_a_line_of_its_own() -> None:
    """Sphinx would take the second one for a sentence about the first."""
    second = re.compile(r"^ +(?:\w+Error, )*\w+Error: .*[.;] \w+Error: .*$", flags=re.MULTILINE)
    assert {p.name: found for p in PACKAGE.rglob("*.py") if (found := second.findall(p.read_text()))} == {}


def _docstrings(source: Path) -> dict[str, str]:
    nodes = ast.parse(source.read_text()).body
    return {n.name: ast.get_docstring(n) or "" for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}

"""The package's files are short, and import each other in no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "unidist"
LONGEST = 350
# What is loaded by its name because an import would close a circle: where Keras's arrival brings the hooks, where a
# picture is drawn of a model, where a notebook shows an object.
BY_NAME = {
    ("unidist.keras_import_hook", "unidist.keras.hooks"),
    ("unidist.drawing.entry", "unidist.keras.api.models"),
    ("unidist.names", "unidist.drawing.page"),
}
Graph = Mapping[str, frozenset[str]]


def too_long(package: Path) -> list[str]:
    """What is to be said of the files that are longer than they may be."""
    lines = {path.relative_to(package).as_posix(): len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    return sorted(f"{name}: {n} lines" for name, n in lines.items() if n > LONGEST)


@dataclass(frozen=True, slots=True)
class Imports(ast.NodeVisitor):
    """What one module imports of the package's modules: at once, inside of functions, and by a name."""

    modules: Mapping[str, Path]
    at_once: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    by_name: set[str] = field(default_factory=set)

    def visit_If(self, node: ast.If) -> None:
        # What is for type checkers alone is imported by nobody.
        only_types = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in node.orelse if only_types else ast.iter_child_nodes(node):
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        inside = Imports(self.modules)
        inside.generic_visit(node)
        self.later.update(inside.at_once, inside.later)
        self.by_name.update(inside.by_name)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.at_once.update(alias.name for alias in node.names if alias.name in self.modules)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert not node.level, "write the whole name of the module"
        names = (f"{node.module}.{alias.name}" for alias in node.names)
        found = {name if name in self.modules else str(node.module) for name in names}
        self.at_once.update(found & self.modules.keys())

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).endswith("import_module") and isinstance(node.args[0], ast.Constant):
            self.by_name.update({node.args[0].value} & self.modules.keys())
        self.generic_visit(node)


@cache
def imports(package: Path) -> dict[str, Imports]:
    """Module -> what it imports."""
    paths = {_module(path.relative_to(package.parent)): path for path in package.rglob("*.py")}
    found = {module: Imports(paths) for module in paths}
    for module, path in paths.items():
        found[module].visit(ast.parse(path.read_text()))
    return found


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def graph(package: Path, *, later: bool = False) -> Graph:
    """Module -> the modules that it runs when it is imported; with `later`, also those of its functions."""
    return {
        module: frozenset().union(
            *(_run_by(module, target) for target in found.at_once | (found.later if later else set()))
        )
        for module, found in imports(package).items()
    }


def _run_by(module: str, target: str) -> frozenset[str]:
    """A target with the packages around it, but those that are being imported already."""
    parts = target.split(".")
    around = (".".join(parts[:n]) for n in range(1, len(parts)))
    return frozenset((target, *(one for one in around if not f"{module}.".startswith(f"{one}."))))


def circle(of: Graph) -> list[str]:
    """One circle of imports; none: []."""
    try:
        TopologicalSorter(of).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]
    return []


def closing(package: Path) -> Iterator[tuple[str, str]]:
    """(module, what it loads by its name), where the two would be in a circle if that were an import."""
    given = graph(package, later=True)
    for module, found in imports(package).items():
        for target in found.by_name:
            if circle({**given, module: given[module] | {target}}):
                yield module, target


def test_files_are_short() -> None:
    assert too_long(PACKAGE) == []


@pytest.mark.parametrize("later", [False, True], ids=["when imported", "inside functions too"])
def test_no_files_import_each_other_in_a_circle(later: bool) -> None:
    given = graph(PACKAGE, later=later)
    assert len(given) > 350
    assert sum(map(len, given.values())) > 1500
    assert circle(given) == []


def test_few_modules_are_loaded_by_their_names_where_an_import_would_close_a_circle() -> None:
    assert set(closing(PACKAGE)) == BY_NAME


# These checks fail where they should ------------------------------------------------------------------------------


def planted(folder: Path, **files: str) -> Path:
    """A package p of files: a dot in a name is a folder."""
    for name, text in {"__init__": "", **files}.items():
        path = folder.joinpath("p", *name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "p"


def test_a_planted_long_file_is_found(tmp_path: Path) -> None:
    package = planted(tmp_path, short="x = 1\n" * 350, long="x = 1\n" * 351)
    assert too_long(package) == ["long.py: 351 lines"]


@pytest.mark.parametrize(
    ("files", "at_once", "inside"),
    [
        pytest.param({"a": "import p.b", "b": "from p import a"}, "p.a p.b", "p.a p.b", id="of two"),
        pytest.param({"a": "import p.b", "b": "def f():\n  import p.a"}, "", "p.a p.b", id="in a function"),
        pytest.param({"a": "import p.b", "b": "if TYPE_CHECKING:\n  import p.a"}, "", "", id="for type checkers"),
        pytest.param(
            {"a": "class A:\n  from p.b import b", "b": "import p.c", "c": "import p.a"}, *["p.a p.b p.c"] * 2
        ),
        pytest.param({"q.__init__": "import p.a", "q.b": "", "a": "from p.q.b import x"}, *["p.a p.q"] * 2),
        pytest.param({"q.__init__": "from p.q.b import x", "q.b": "import p.a", "a": "import os"}, "", "", id="none"),
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, files: dict[str, str], at_once: str, inside: str) -> None:
    package = planted(tmp_path, **files)
    assert set(circle(graph(package))) == set(at_once.split())
    assert set(circle(graph(package, later=True))) == set(inside.split())


def test_a_planted_circle_by_name_is_found(tmp_path: Path) -> None:
    up = 'def f():\n  importlib.import_module("p.a")'
    package = planted(tmp_path, a="import p.b", b=up, c=up)
    assert circle(graph(package, later=True)) == []
    assert list(closing(package)) == [("p.b", "p.a")]

"""What unidist uses from inside Keras is named in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "unidist"
TABLE = PACKAGE / "keras" / "patching" / "compat.py"
INSIDE = "keras.src"


def trees(word: str) -> Iterator[tuple[Path, ast.Module]]:
    """The package's files that have the word."""
    for path in PACKAGE.rglob("*.py"):
        if word in (text := path.read_text()):
            yield path, ast.parse(text)


def lines_inside(tree: ast.Module) -> list[int]:
    """The lines that name a place inside Keras: imports, attributes and texts, not comments."""
    return [node.lineno for node in ast.walk(tree) if any(INSIDE in name for name in names(node))]  # type: ignore[attr-defined]


def names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute):
        return [ast.unparse(node)] if node.attr == "src" else []
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def test_one_file_names_places_inside_keras() -> None:
    found = {path: lines for path, tree in trees("src") if (lines := lines_inside(tree))}
    assert set(found) == {TABLE}, found


def test_every_name_of_the_table_is_used_and_every_name_used_is_in_it() -> None:
    tables = {
        target.id: {ast.literal_eval(key) for key in node.value.keys}  # type: ignore[arg-type]
        for node in ast.parse(TABLE.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    listed = set.union(*tables.values())
    used = {
        alias.name
        for _, tree in trees("unidist.keras.patching.compat")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "unidist.keras.patching.compat"
        for alias in node.names
    }
    assert set(tables) == {"_PLACES", "_MOVED"}
    assert not tables["_PLACES"] & tables["_MOVED"]
    assert listed - used == set()
    assert used - listed == {"INSIDE", "READ", "TORCH_OPTIMIZERS", "missing", "nearest"}

"""A function of a notebook as a program: its source, and that of what it uses; modules by their names."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import linecache
import os
import symtable
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from unidist.launch.request import LaunchError
from unidist.notebook import values

_HEAD = """\
# Written by unidist.notebook_run, for one run.
from __future__ import annotations

import sys

sys.path += [entry for entry in {paths!r} if entry not in sys.path]

import unidist

# Before Keras is imported, by whatever comes below.
unidist.use({backend!r})

from unidist.notebook import child as _unidist_child

{names}= _unidist_child.names({folder!r})
"""
_FOOT = """
if __name__ == "__main__":
    _unidist_child.answer({name}, {folder!r})
"""


@dataclass
class _Parts:
    imports: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def text_of(function: Any, folder: Path, backend: str) -> tuple[str, dict[str, Any]]:
    """The program that calls a function, and the values of the notebook that it uses, by their names.

    Args:
        folder: where the program finds those values, and leaves what comes of it.

    Raises:
        LaunchError: the function cannot stand alone; the text says what of it, and what to do.
    """
    _check(function)
    parts = _Parts()
    _add(function.__name__, function, parts)
    names = "".join(f"{name}, " for name in parts.values)
    head = _HEAD.format(
        paths=[os.path.abspath(entry) for entry in sys.path],
        backend=backend,
        folder=str(folder),
        names=names or "_ ",
    )
    # What is used comes before what uses it: a decorator and a default are run where they stand.
    body = [*parts.imports.values(), "", *parts.sources.values()]
    foot = _FOOT.format(name=function.__name__, folder=str(folder))
    return head + "\n".join(["", *body]) + "\n" + foot, parts.values


def _check(function: Any) -> None:
    what = getattr(function, "__name__", type(function).__name__)
    if not isinstance(function, FunctionType) or what == "<lambda>":
        raise LaunchError(f"notebook_run runs functions that are written with def, found {what}: write one around it")
    if function.__closure__:
        names = ", ".join(function.__code__.co_freevars)
        raise LaunchError(f"{what} uses {names} of a function around it: make these its arguments")
    if function.__qualname__ != what and "<locals>" not in function.__qualname__:
        raise LaunchError(f"{function.__qualname__} is a method: write a function that makes the object")


def _add(name: str, thing: Any, parts: _Parts) -> None:
    if name in parts.sources:
        return
    source, known = _source(name, thing), _globals(thing)
    # Its place is taken before what it uses is looked at: functions may call each other.
    parts.sources[name] = ""
    for used in _names(source):
        if used in known and used != name and not hasattr(builtins, used):
            _add_global(used, known[used], parts, of=name)
    parts.sources[name] = source
    parts.sources = {**{k: v for k, v in parts.sources.items() if k != name}, name: source}


def _add_global(name: str, value: Any, parts: _Parts, of: str) -> None:
    if name in parts.imports or name in parts.values:
        return
    if isinstance(value, ModuleType):
        parts.imports[name] = f"import {value.__name__} as {name}"
    elif (home := _home(value)) is not None:
        parts.imports[name] = f"from {home} import {value.__qualname__} as {name}"
    elif isinstance(value, FunctionType | type):
        if isinstance(value, FunctionType):
            _check(value)
        if value.__name__ != name:
            raise LaunchError(f"{of} uses {name}, which is {value.__name__} by another name: use its own")
        _add(name, value, parts)
    elif values.is_plain(value):
        parts.values[name] = value
    else:
        raise LaunchError(
            f"{of} uses {name}, a {type(value).__name__} of the notebook, which processes cannot be given: make it "
            f"inside {of}"
        )


def _home(value: Any) -> str | None:
    """The module from which a process can import a function or class; None where it is the notebook's own."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not isinstance(name, str) or not name.isidentifier():
        return None
    found = getattr(sys.modules.get(module), name, None)
    return module if found is value and _has_file(module) else None


def _has_file(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _source(name: str, thing: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        found = _of_a_cell(name, thing) if isinstance(thing, type) else None
    if found is None:
        raise LaunchError(
            f"the source of {name} is not known: write it inside the function, or in a file that is imported"
        )
    return found


def _of_a_cell(name: str, kind: type) -> str | None:
    """The source of a notebook's class, by its methods: Python looks for classes in files alone."""
    for method in _methods(kind):
        text = "".join(linecache.getlines(method.__code__.co_filename))
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                return "\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n"
    return None


def _methods(kind: type) -> list[FunctionType]:
    return [member for member in vars(kind).values() if isinstance(member, FunctionType)]


def _globals(thing: Any) -> dict[str, Any]:
    if isinstance(thing, FunctionType):
        return thing.__globals__
    methods = _methods(thing)
    return methods[0].__globals__ if methods else vars(sys.modules[thing.__module__])


def _names(source: str) -> list[str]:
    """The names that a definition reads and does not make itself, without those of annotations."""
    top = symtable.symtable(f"from __future__ import annotations\n{source}", "<notebook>", "exec")
    tables, found = [top], []
    for table in tables:
        tables += table.get_children()
        is_read = (one for one in table.get_symbols() if one.is_referenced())
        found += [one.get_name() for one in is_read if (table is top and not one.is_assigned()) or one.is_global()]
    return list(dict.fromkeys(found))

"""Says what layers with cut weights do, in words: for `describe` and for the log."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import keras

from unidist import session
from unidist.algebra import Axes, Layout
from unidist.keras import driver as drivers
from unidist.keras.records import variable_record
from unidist.keras.strategies.distribution import UnidistDistribution, adopt

_NAMES = 3
_BOLD = re.compile(r"\x1b\[\d*m")
_log = logging.getLogger(__name__)
# Model -> the distribution under which it was logged.
_told: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# What is known behind the first step alone.
_LATER = ("not called",)
_USUAL = ("column:", "row:")
_LINES = 8


def listed(names: Iterable[str]) -> str:
    """Names in a sentence, each once; of many the first ones.

    Example:
        >>> listed("a"), listed("aab"), listed("abcdefg")
        ('a', 'a and b', 'a, b, c and 4 more')
    """
    found = list(dict.fromkeys(names))
    *first, last = found if len(found) <= _NAMES + 1 else [*found[:_NAMES], f"{len(found) - _NAMES} more"]
    return f"{', '.join(first)} and {last}" if first else last


def in_words(error: Exception) -> str:
    """Returns an error in one line.

    Keras says the layer in the first line, in bold behind it what went wrong, then all arguments.
    """
    said = [line for line in _BOLD.sub("", str(error)).split("\n") if line.strip()]
    return " ".join(said[:2])


def joined(entries: Iterable[tuple[str, str]]) -> dict[str, str]:
    """name -> what is logged of it; where several have one name, all that differs.

    Example:
        >>> joined([("net/a", "column"), ("net/b", "row"), ("net/a", "not called yet"), ("net/b", "row")])
        {'net/a': 'column; not called yet', 'net/b': 'row'}
    """
    found: dict[str, dict[str, None]] = {}
    for name, text in entries:
        found.setdefault(name, {})[text] = None
    return {name: "; ".join(texts) for name, texts in found.items()}


def numbered(path: str, taken: Container[str]) -> str:
    """A path, with "#2", "#3"... behind it where it is taken.

    Example:
        >>> numbered("net/a", ["net/a", "net/a#2"])
        'net/a#3'
    """
    name, k = path, 1
    while name in taken:
        k += 1
        name = f"{path}#{k}"
    return name


def warn(text: str) -> None:
    """Warns once for the world, by its first process, at the program's line that called unidist or Keras."""
    if session.process_index():
        return
    folders = (Path(keras.__file__).parent, Path(__file__).parents[1])
    inside, level = (*(f"{folder}{os.sep}" for folder in folders), contextlib.__file__), 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level + 1)


def own_variables(layer: Any) -> list[Any]:
    """The variables of a layer that are not those of layers inside it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def in_parts(variables: Iterable[Any]) -> str:
    """Says that variables rest in parts over the data axes alone."""
    return f"gathered for each call: data axes cut {_names(variables)}"


def of_partitioned(
    model: Any, layouts: Callable[[Any], tuple[Layout, Layout]], data_axes: Axes, partitioner: str, refused: str = ""
) -> Iterator[tuple[str, str]]:
    """Yields (name, what it does) of each layer with cut weights, where another chooses how it computes.

    Args:
        layouts: where a variable rests, and where its layer reads it.
        partitioner: who chooses how a layer computes with shards.
        refused: what it does not compute with, so that the weights are gathered.
    """
    for layer in model._flatten_layers():
        on_shards: list[Any] = []
        resting: list[Any] = []
        gathered: list[Any] = []
        for variable in own_variables(layer):
            rests, read = layouts(variable)
            if read.dims:
                on_shards.append(variable)
            elif rests.dims:
                (resting if set(rests.sharded_axes) <= set(data_axes) else gathered).append(variable)
        name = layer.path or layer.name
        if on_shards:
            yield name, f"{partitioner} chooses how it computes with the shards of {_names(on_shards)}"
        if resting:
            yield name, in_parts(resting)
        if gathered:
            yield name, f"gathered for each call: {refused}, as of {_names(gathered)}"


def _names(variables: Iterable[Any]) -> str:
    return listed(repr(v.name) for v in variables)


# the log --------------------------------------------------------------------------------------------------------------


def applied(model: Any, distribution: Any) -> None:
    """Logs, once for a model and a distribution, its layouts, and what its layers do if that is known."""
    if not _log.isEnabledFor(logging.INFO) or not model.built or _told.get(model) is distribution:
        return
    _told[model] = distribution
    ours = adopt(distribution)
    strategy = ours.strategy
    weights = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
    lie = [(v, variable_record.layouts_of(v, distribution, is_weight=id(v) in weights)) for v in model.variables]
    _log.info(
        "model %r under %s on %r: %d of %d variables cut, batches over %s, zero=%d",
        model.name,
        type(distribution).__name__,
        strategy.mesh,
        sum(_is_cut(layouts.storage, ours) for _, layouts in lie),
        len(lie),
        ", ".join(map(repr, strategy.data_axes)) or "no axis",
        strategy.zero,
    )
    for variable, layouts in lie:
        three = f"rests {layouts.storage}, is used {layouts.compute}, is updated {layouts.state}"
        _log.debug("%r of shape %s %s: %s", variable.path, tuple(variable.shape), three, _rule(variable.path, ours))
    entries = driver.reasons(model) if (driver := drivers.current()) is not None else ()
    said((name, text) for name, text in entries if not text.startswith(_LATER))


def said(entries: Iterable[tuple[str, str]]) -> None:
    """Logs what layers do: each of them, and those that gather in a few lines.

    Layers that do the same are named together.
    """
    names: dict[str, list[str]] = {}
    for name, text in entries:
        names.setdefault(text, []).append(name)
        _log.debug("%r: %s", name, text)
    # Of large models a few lines: which layers do otherwise is what is looked for.
    odd = {text: found for text, found in names.items() if not text.startswith(_USUAL)}
    for text, found in [*odd.items()][:_LINES]:
        _log.info("%s: %s", text, listed(map(repr, found)))
    if len(odd) > _LINES:
        _log.info("and %d reasons more: UNIDIST_LOG=debug and describe(model).why tell all", len(odd) - _LINES)


def _is_cut(layout: Layout, distribution: UnidistDistribution) -> bool:
    return any(distribution.mesh.axis_size(axis) > 1 for axis in layout.sharded_axes)


def _rule(path: str, distribution: UnidistDistribution) -> str:
    rule = None if distribution.layout_map is None else distribution.layout_map.match(path)
    if rule is None:
        return "no rule"
    return f"rule {rule!r}" if distribution.found is None else "found by the plan"

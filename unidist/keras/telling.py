"""What layers with cut weights do, in words: for `describe` and for the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from unidist.algebra import Axes, Layout

_NAMES = 3


def listed(names: Iterable[str]) -> str:
    """Names in a sentence, each once; of many the first ones.

    Example:
        >>> listed("a"), listed("aab"), listed("abcdefg")
        ('a', 'a and b', 'a, b, c and 4 more')
    """
    found = list(dict.fromkeys(names))
    *first, last = found if len(found) <= _NAMES + 1 else [*found[:_NAMES], f"{len(found) - _NAMES} more"]
    return f"{', '.join(first)} and {last}" if first else last


def joined(entries: Iterable[tuple[str, str]]) -> dict[str, str]:
    """name -> what is told of it; where several have one name, all that differs.

    Example:
        >>> joined([("net/a", "column"), ("net/b", "row"), ("net/a", "not called yet"), ("net/b", "row")])
        {'net/a': 'column; not called yet', 'net/b': 'row'}
    """
    found: dict[str, dict[str, None]] = {}
    for name, text in entries:
        found.setdefault(name, {})[text] = None
    return {name: "; ".join(texts) for name, texts in found.items()}


def own_variables(layer: Any) -> list[Any]:
    """The variables of a layer that are not those of layers inside it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def in_parts(variables: Iterable[Any]) -> str:
    """Of variables that rest in parts over the data axes alone."""
    return f"gathered for each call: data axes cut {_names(variables)}"


def of_partitioned(
    model: Any, lies: Callable[[Any], tuple[Layout, Layout]], data_axes: Axes, partitioner: str, refused: str = ""
) -> Iterator[tuple[str, str]]:
    """(name, what it does) of each layer with cut weights, where another than unidist chooses how it computes.

    Args:
        lies: where a variable rests, and where its layer reads it.
        partitioner: who chooses how a layer computes with shards.
        refused: what it does not compute with, so that the weights are gathered.
    """
    for layer in model._flatten_layers():
        on_shards: list[Any] = []
        resting: list[Any] = []
        gathered: list[Any] = []
        for variable in own_variables(layer):
            rests, read = lies(variable)
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

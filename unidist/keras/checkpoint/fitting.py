"""Fits a checkpoint to a model: compares names, shapes and dtypes, and converts numbers."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from unidist.algebra.sharding import Region
from unidist.backends.protocol import Array, itemsize
from unidist.checkpoint.assets import KIND
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CheckpointError
from unidist.keras.checkpoint import renaming
from unidist.keras.checkpoint.fetching import Source
from unidist.keras.checkpoint.held import WORDS, Held, Read, entries, words
from unidist.keras.checkpoint.layer_assets import Plan
from unidist.keras.checkpoint.states import State

_log = logging.getLogger(__name__)
# What unidist itself keeps among the facts.
OWN = "unidist"
_BUILD = (
    "Build the model as it was built then (keras.utils.clear_session() resets the names that Keras gives), or restore "
    "what fits with strict=False"
)
_COMPILE = (
    "The weights fit, and the optimizer is another one: compile the model as it was compiled then, or restore the "
    "weights alone with strict=False"
)


def reading(reader: Reader | Source, name: str, dtype: str) -> Read:
    """Returns what gives the words of a region, in the model's dtype."""
    written = reader.tensors[name].dtype

    def read(region: Region, out: Array | None) -> Array:
        own = np.empty([n for _, n in region], WORDS[itemsize(dtype)]) if out is None else out
        found = own if written == dtype else np.empty(own.shape, WORDS[itemsize(written)])
        if found.size:
            reader.read_into(name, region, found.reshape(-1).view(np.uint8))
        if written != dtype:
            own[...] = words(_converted(entries(found, written), dtype, name))
        return own

    return read


def _converted(value: Array, dtype: str, name: str) -> Array:
    found = value.astype(np.dtype(dtype))
    if value.dtype.kind in "iu" and (found.astype(value.dtype) != value).any():
        raise CheckpointError(f"{name}: has whole numbers that do not fit into the model's {dtype}", tensor=name)
    return found


def fitting(
    state: State, reader: Reader | Source, kept: Plan, *, strict: bool, is_old: bool
) -> tuple[list[tuple[str, Held]], list[str]]:
    """(what model and checkpoint both have, what only one has).

    Args:
        kept: what layers take beside their variables.
        is_old: whether the step is of a time when checkpoints had nothing of it.

    Raises:
        CheckpointError: with `strict`, where something is missing, too much, or of another shape or dtype.
    """
    stored = {name: tensor.kind for name, tensor in reader.tensors.items() if tensor.kind != KIND}
    mine = {tensor.name: tensor.kind for tensor, _ in state.variables}
    there = renaming.in_checkpoint(state.model, mine, stored, noted(reader)[1])
    ours = {there.get(tensor.name, tensor.name): (tensor, held) for tensor, held in state.variables}
    wrong = [*kept.wrong, *([] if is_old else kept.missing)]
    others = len(wrong)
    lenient: list[str] = []
    found = []
    for name in dict.fromkeys([*ours, *stored]):
        theirs = reader.tensors.get(name)
        own = ours.get(name)
        wrongly = problem(own[0] if own else None, theirs)
        if own is not None and not wrongly:
            found.append((name, own[1]))
            continue
        kind = own[0].kind if own is not None else theirs.kind  # type: ignore[union-attr]
        # A model that is not compiled has neither; metrics come and go with what a model was asked.
        optional = kind == "state" or (kind == "optimizer" and own is None and not state.has_optimizer)
        (lenient if optional else wrong).append(f"{name}: {wrongly}")
        others += kind != "optimizer" and not optional
    if wrong and strict:
        shown = "\n".join(f"- {line}" for line in sorted(wrong))
        hint = _BUILD
        if not others:
            hint = _COMPILE if "optimizer" in stored.values() else f"It was saved without an optimizer. {_COMPILE}"
        raise CheckpointError(
            f"step {reader.step} of {reader.where} does not fit model {state.model.name!r}:\n{shown}\n{hint}"
        )
    old = _left(reader, kept.missing if is_old else [])
    return [*found, *kept.fits.items()], old if strict else sorted([*wrong, *lenient, *old])


def noted(reader: Reader | Source) -> tuple[Any, list[str]]:
    """(config of the model that was saved, names of its variables in order), as far as they are known."""
    match reader.facts.get(OWN):
        case {"config": {"model": text, "names": [*names]}} if all(isinstance(name, str) for name in names):
            return text, names
    return None, []


def _left(reader: Reader | Source, missing: list[str]) -> list[str]:
    """Says what stays as it is, since the step is of before; as texts for whoever asked."""
    if missing:
        _log.warning(
            "step %d of %s was written by a unidist that kept variables alone: these layers stay as they are: %s",
            *(reader.step, reader.where, "; ".join(line.partition(": ")[0] for line in missing)),
        )
    return [f"{line}; the step is of a unidist that kept variables alone" for line in missing]


def problem(own: Tensor | None, theirs: Tensor | None) -> str:
    if own is None:
        return "is in the checkpoint alone"
    if theirs is None:
        return "is in the model alone"
    if own.shape != theirs.shape:
        return f"has shape {own.shape} in the model and {theirs.shape} in the checkpoint"
    if own.dtype != theirs.dtype and _sort(own.dtype) != _sort(theirs.dtype):
        return f"is {own.dtype} in the model and {theirs.dtype} in the checkpoint"
    return ""


def _sort(dtype: str) -> str:
    kind = np.dtype(dtype).kind
    return "whole" if kind in "iu" else "truth" if kind == "b" else "float"

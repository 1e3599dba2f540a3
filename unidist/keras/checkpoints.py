"""save and restore: a model's state in files that all its processes write together, and any mesh and backend reads.

A variable comes to its file so: each process brings what it stores to ranges of rows (checkpoint/shares.py), and writes
their bytes where they belong in the whole tensor. Nothing in the files knows of a mesh. Back: each process reads the
bytes of what it stores.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from unidist import __version__
from unidist.algebra.sharding import Region
from unidist.backends.protocol import Array, itemsize
from unidist.checkpoint import folders
from unidist.checkpoint.directory import Directory, FolderDirectory, directory_of
from unidist.checkpoint.reading import Reader, Verify
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CapabilityError, CheckpointError
from unidist.flight.recorder import recorder
from unidist.keras import configs, later, renaming, seeds
from unidist.keras.fetching import Source
from unidist.keras.held import WORDS, Held, Read, entries, words
from unidist.keras.states import State, tried

_log = logging.getLogger(__name__)
# What unidist itself keeps among the facts, beside the user's own; and the model's config in it.
OWN, _USERS = "unidist", "facts"
# The manifest has a bound, and the rest of it needs some.
_LARGEST_CONFIG = 4 << 20
Step = int | Literal["latest"]


@dataclass(frozen=True)
class Restored:
    """What `restore` has found.

    Attributes:
        step: of the checkpoint.
        facts: what was given to `save` with it.
        skipped: without `strict`, the variables that only one of model and checkpoint has, or of another shape, each
            with the reason.
        converted: the variables that were read as another dtype than they were written in, with both.

    Example:
        >>> Restored(step=3).skipped
        ()
    """

    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()


def save(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path | str:
    """Writes a model's weights, its optimizer's and metrics' variables and the random state, as one step of a folder.

    A collective of the processes that hold the model: each writes a part. A process holds its shards and a buffer of
    64 MiB, no more. The step counts when all of it is on the disk, and not before.

    Args:
        model: a built Keras model, distributed or not. Its optimizer is built if need be.
        directory: the folder of the checkpoints, which all processes see; or an address in an object store, as
            "s3://bucket/run" (needs fsspec), where each process writes one object.
        step: the step's number; by default the optimizer's count of steps. A step of this number is replaced.
        asynchronous: copies what this process writes into memory, and returns while a process of its own writes it.
            `save`, `restore` and `wait` raise what went wrong there; they wait for it first.
        keep: how many steps stay; older ones are removed when the new one stands. None: all.
        facts: JSON of your own, which `restore` gives back.

    Returns:
        The step's folder; the address of its manifest as a text.

    Raises:
        CheckpointError: the files could not be written, by this process or by another. The step does not count.
        CapabilityError: `asynchronous` with an address.
        LayoutError: the model is not built.

    Example:
        >>> import keras, tempfile, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> _ = unidist.parallelize(model, unidist.ModelParallel())
        >>> unidist.save(model, tempfile.mkdtemp(), step=7).name
        'step-00000007'
    """
    with recorder.phase("saving"):
        return _save(model, os.fspath(directory), step, asynchronous, keep, facts)


def _save(
    model: Any, where: str, step: int | None, asynchronous: bool, keep: int | None, facts: Mapping[str, Any] | None
) -> Path | str:
    later.wait()
    directory = directory_of(where)
    if asynchronous and not isinstance(directory, FolderDirectory):
        raise CapabilityError(f"asynchronous=True writes into folders, and {where!r} is an address: leave it out")
    state = State.of(model)
    holders = state.holders

    # By all processes: a variable that is asked for may be a collective.
    number = _count_of(model) if step is None else step
    told = {OWN: _told_of(state), _USERS: dict(facts or {})}

    def begin() -> dict[str, Any]:
        _check_json(told)
        return {"name": directory.prepare(number, state.files), "step": number}

    begun = holders.by_first(begin)
    name, number = begun["name"], int(begun["step"])
    if asynchronous and isinstance(directory, FolderDirectory):
        later.start(state, directory.path / name, told, keep, number)
        return folders.folder_of(directory.path, number)
    holders.agree(_write(state, directory, name), f"write {name} in {where}")

    def end() -> dict[str, Any]:
        stands = directory.commit(name, state.files, told, holders.count)
        if keep is not None:
            directory.prune(keep, number)
        return {"stands": stands}

    stands = str(holders.by_first(end)["stands"])
    recorder.committed(number)
    return Path(stands) if isinstance(directory, FolderDirectory) else stands


def wait() -> None:
    """Returns when what `save(..., asynchronous=True)` began is written, or nothing is. A collective of its processes.

    Raises:
        CheckpointError: it could not be written, by this process or by another. The step does not count.

    Example:
        >>> wait()
    """
    with recorder.phase("saving"):
        later.wait()


def _write(state: State, directory: Directory, name: str) -> OSError | None:
    """Writes what this process brings of each variable. Gives the failure, if it cannot."""
    try:
        writer = directory.writer(name, state.files, state.holders.place)
    except OSError as error:
        return state.bring(lambda *piece: None, error)
    with writer:
        return state.bring(writer.write, None) or tried(writer.finish)


def _check_json(told: dict[str, Any]) -> None:
    try:
        json.dumps(told, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"facts are JSON, and these are not: {error}") from error


def _count_of(model: Any) -> int:
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(np.asarray(optimizer.iterations))


def _told_of(state: State) -> dict[str, Any]:
    return {
        "versions": {"unidist": __version__, "keras": keras.__version__},
        "keras backend": keras.config.backend(),
        "processes": state.holders.count,
        "model": state.model.name,
        "config": _config_of(state),
        "random": seeds.state().decode(),
    }


def _config_of(state: State) -> dict[str, Any] | None:
    """What Keras makes the model of again, and the names of its variables in their order: one that Keras makes of a
    config may have other paths. None where there is none: a class of the user's that does not say how, or too much."""
    try:
        text = configs.config_of(state.model)
    # Whatever a user's `get_config` raises, the checkpoint is written.
    except Exception as error:
        _log.info("no config in checkpoints of model %r: %s", state.model.name, error)
        return None
    found = {"model": text, "names": [tensor.name for tensor, _ in state.variables]}
    return found if len(json.dumps(found)) <= _LARGEST_CONFIG else None


def restore(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    step: Step = "latest",
    strict: bool = True,
    verify: Verify = "read",
) -> Restored:
    """Reads a step into a model, in place, onto the layouts that it has: whatever mesh, ZeRO stage, number of processes
    and Keras backend wrote it. Values are bit for bit those that were written; where the model has floats of another
    precision, or whole numbers of another size (Keras's own differ by backend), they are converted.

    A collective of the processes that hold the model: each reads the bytes of its own shards.

    Args:
        model: a built Keras model, distributed or not. Its optimizer is built if need be.
        directory: the folder of the checkpoints, or their address.
        step: the step's number, or the latest that counts.
        strict: variables that only one of model and checkpoint has, or of another shape, are an error. A model that has
            no optimizer takes the weights alone, and the states of metrics need not fit.
        verify: "read": the checksums of what is read; "all": of the whole step, first; "off": none.

    Returns:
        The step, the facts that were saved with it, and what was skipped.

    Raises:
        CheckpointError: there is no such step, it does not fit the model, or what is there is not what was written; on
            all processes. Where it is found while values are read, some variables have theirs already.
        LayoutError: the model is not built.

    Example:
        >>> import keras, tempfile, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> _ = unidist.parallelize(model, unidist.ModelParallel())
        >>> folder = tempfile.mkdtemp()
        >>> _ = unidist.save(model, folder, step=7, facts={"note": "half way"})
        >>> unidist.restore(model, folder)
        Restored(step=7, facts={'note': 'half way'}, skipped=(), converted=())
    """
    with recorder.phase("loading"):
        return _restore(model, os.fspath(directory), step, strict, verify)


def _restore(model: Any, where: str, step: Step, strict: bool, verify: Verify) -> Restored:
    later.wait()
    state = State.of(model)

    def find() -> dict[str, Any]:
        with Reader(where, step, "off") as found:
            return {"step": found.step}

    number = state.holders.by_first(find)["step"]
    return _put(state, lambda: Reader(where, number, verify), f"step {number} of {where}", strict)


def restore_from(model: Any, source: Source) -> None:
    """`restore` of a step that is in memory. A collective."""
    with recorder.phase("loading"):
        later.wait()
        state = State.of(model)
        _put(state, lambda: source, f"step {source.step} in memory", True)


def _put(state: State, opened: Callable[[], Reader | Source], what: str, strict: bool) -> Restored:
    holders = state.holders
    failure: OSError | None = None
    reader: Reader | Source | None = None
    skipped: list[str] = []
    try:
        reader = opened()
        fits, skipped = _fitting(state, reader, strict)
        # All see that it fits before the first value is changed.
    except OSError as error:
        failure = error
    holders.agree(failure, f"read {what}")
    assert reader is not None
    with contextlib.closing(reader):
        if isinstance(reader, Source):
            reader.plan(fits)
        for name, held in fits:
            if isinstance(reader, Source):
                reader.bring(name)
            failure = failure or tried(lambda: held.put(reading(reader, name, held.dtype)))  # noqa: B023 (called here)
        holders.agree(failure, f"read {what}; some variables have its values already")
        facts, told = reader.facts, {name: tensor.dtype for name, tensor in reader.tensors.items()}
    for layer in state.model._flatten_layers():
        # As Keras does after loading: Normalization computes with what it has made of its variables.
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()
    own, users = facts.get(OWN), facts.get(_USERS)
    if isinstance(own, dict) and isinstance(own.get("random"), str):
        _go_on_with(own["random"], what)
    converted = [f"{name}: {theirs} -> {held.dtype}" for name, held in fits if (theirs := told[name]) != held.dtype]
    return Restored(reader.step, users if isinstance(users, dict) else {}, tuple(skipped), tuple(converted))


def _go_on_with(random: str, where: str) -> None:
    """Raises CheckpointError: it is no random state."""
    try:
        seeds.restore(random.encode())
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: its random state is none: {type(error).__name__}: {error}") from error


def latest(directory: str | os.PathLike[str]) -> int | None:
    """The latest step that counts, or None. No collective.

    Example:
        >>> latest("/no/such/folder") is None
        True
    """
    return directory_of(directory).latest()


def reading(reader: Reader | Source, name: str, dtype: str) -> Read:
    """What gives the words of a region, in the model's dtype."""
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
    """Raises CheckpointError: a whole number does not fit."""
    found = value.astype(np.dtype(dtype))
    if value.dtype.kind in "iu" and (found.astype(value.dtype) != value).any():
        raise CheckpointError(f"{name}: has whole numbers that do not fit into the model's {dtype}", tensor=name)
    return found


def _fitting(state: State, reader: Reader | Source, strict: bool) -> tuple[list[tuple[str, Held]], list[str]]:
    """(what model and checkpoint both have, what only one has).

    Raises:
        CheckpointError: with `strict`, where something is missing, too much, or of another shape or dtype.
    """
    stored = {name: tensor.kind for name, tensor in reader.tensors.items()}
    there = renaming.in_checkpoint(state.model, {tensor.name: tensor.kind for tensor, _ in state.variables}, stored)
    ours = {there.get(tensor.name, tensor.name): (tensor, held) for tensor, held in state.variables}
    wrong: list[str] = []
    lenient: list[str] = []
    fitting = []
    kinds = set(stored.values())
    for name in dict.fromkeys([*ours, *reader.tensors]):
        theirs = reader.tensors.get(name)
        own = ours.get(name)
        wrongly = problem(own[0] if own else None, theirs)
        if own is not None and not wrongly:
            fitting.append((name, own[1]))
            continue
        kind = own[0].kind if own is not None else theirs.kind  # type: ignore[union-attr]
        # A model that is not compiled has neither; metrics come and go with what a model was asked.
        optional = kind == "state" or (kind == "optimizer" and own is None and not state.has_optimizer)
        (lenient if optional else wrong).append(f"{name}: {wrongly}")
    if wrong and strict:
        shown = "\n".join(f"- {line}" for line in sorted(wrong))
        hint = "" if "optimizer" in kinds or not state.has_optimizer else " It was saved without an optimizer."
        raise CheckpointError(
            f"step {reader.step} of {reader.where} does not fit model {state.model.name!r}:\n{shown}\n"
            f"{hint}Build the model as it was built then (keras.utils.clear_session() resets the names that Keras "
            "gives), or restore what fits with strict=False"
        )
    return fitting, [] if strict else sorted([*wrong, *lenient])


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
    """Numbers of one sort can be converted into each other."""
    kind = np.dtype(dtype).kind
    return "whole" if kind in "iu" else "truth" if kind == "b" else "float"

"""save and restore: a model's state in files that all its processes write, and any mesh reads.

A variable comes to its file so: each process brings what it stores to ranges of rows (checkpoint/shares.py), and writes
their bytes where they belong in the whole tensor. Nothing in the files knows of a mesh or of a backend. Back: each
process reads the bytes of what it stores.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from unidist import __version__, log
from unidist.checkpoint.directory import Directory, Step
from unidist.checkpoint.folders import FolderDirectory
from unidist.checkpoint.reading import Reader, Verify
from unidist.checkpoint.remote import directory_of
from unidist.errors import CapabilityError, CheckpointError
from unidist.flight.recorder import recorder
from unidist.keras import model_config, seeds
from unidist.keras.checkpoint import later, layer_assets
from unidist.keras.checkpoint.fetching import Source
from unidist.keras.checkpoint.fitting import OWN, fitting, reading
from unidist.keras.checkpoint.states import State, agree, by_first, tried

_log = logging.getLogger(__name__)
# Beside what unidist itself keeps among the facts, the user's own; and what says that layers' files are there.
_USERS, _KEPT = "facts", "kept"
_LARGEST_CONFIG = 4 << 20  # the manifest has a bound, and the rest of it needs some


@dataclass(frozen=True)
class Restored:
    """Holds what `restore` has found.

    Attributes:
        step: of the checkpoint.
        facts: what was given to `save` with it.
        skipped: without `strict`: what only one of the two has, or in another shape, each with the reason.
        converted: the variables that were read as another dtype than they were written in, with both.

    Example:
        >>> Restored(step=3).skipped
        ()
    """

    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()


@recorder.phase("saving")
def save(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path | str:
    """Writes a model's variables, its optimizer's and metrics', and the random state, as one step.

    What layers keep beside them goes there too, such as vocabularies that `adapt` has learned. A collective of the
    model's processes: each writes a part, and holds its shards and a buffer of 64 MiB, no more. The step counts when
    all of it is on the disk.

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
    later.wait()
    there = directory_of(directory)
    if asynchronous and not isinstance(there, FolderDirectory):
        raise CapabilityError(f"asynchronous=True writes into folders, and {there.where!r} is an address: leave it out")
    bare = State.of(model)
    state = layer_assets.with_kept(bare)
    holders = state.holders

    # By all processes: a variable that is asked for may be a collective.
    number = _count_of(model) if step is None else step
    told = {OWN: _told_of(bare), _USERS: dict(facts or {})}

    def begin() -> dict[str, Any]:
        _check_json(told)
        return {"name": there.prepare(number, state.files), "step": number}

    begun = by_first(holders, begin)
    name, number = begun["name"], int(begun["step"])
    if asynchronous and isinstance(there, FolderDirectory):
        later.start(state, there.path / name, told, keep, number)
        return there.folder(number)
    with log.while_long(f"writing {name} in {there.where}"):
        agree(holders, _write(state, there, name), f"write {name} in {there.where}")

    def end() -> dict[str, Any]:
        stands = there.commit(name, state.files, told, holders.count)
        if keep is not None:
            there.prune(keep, number)
        return {"stands": stands}

    stands = str(by_first(holders, end)["stands"])
    recorder.committed(number)
    return Path(stands) if isinstance(there, FolderDirectory) else stands


@recorder.phase("saving")
def wait() -> None:
    """Waits until all that `save(..., asynchronous=True)` began is written. A collective of its processes.

    Raises:
        CheckpointError: it could not be written, by this process or by another. The step does not count.

    Example:
        >>> wait()
    """
    later.wait()


def _write(state: State, directory: Directory, name: str) -> OSError | None:
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
        # Checkpoints of before have nothing that layers keep beside their variables.
        _KEPT: True,
    }


def _config_of(state: State) -> dict[str, Any] | None:
    """Returns the config and the variables' names in order; None if these are too large.

    Keras's model of a config may have other paths. The config is None where a class gives none, or it is too large."""
    names = [tensor.name for tensor, _ in state.variables]
    text = None
    try:
        text = model_config.config_of(state.model)
    # Whatever a user's `get_config` raises, the checkpoint is written.
    except Exception as error:
        _log.info("no config in checkpoints of model %r: %s", state.model.name, error)
    for found in ({"model": text, "names": names}, {"model": None, "names": names}):
        if len(json.dumps(found)) <= _LARGEST_CONFIG:
            return found
    return None


@recorder.phase("loading")
def restore(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    step: Step = "latest",
    strict: bool = True,
    verify: Verify = "read",
) -> Restored:
    """Reads a step into a model, in place, onto its own layouts, whatever mesh and backend wrote it.

    Any ZeRO stage and number of processes will do. Values are those that were written, bit for bit. They are converted
    where the model has floats of another precision, or whole numbers of another size (Keras's own differ by backend).
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
    later.wait()
    state, where = State.of(model), os.fspath(directory)

    def find() -> dict[str, Any]:
        with Reader(where, step, "off") as found:
            return {"step": found.step}

    number = by_first(state.holders, find)["step"]
    return _put(state, lambda: Reader(where, number, verify), f"step {number} of {where}", strict)


@recorder.phase("loading")
def restore_from(model: Any, source: Source) -> None:
    """`restore` of a step that is in memory. A collective."""
    later.wait()
    _put(State.of(model), lambda: source, f"step {source.step} in memory", True)


def _put(state: State, opened: Callable[[], Reader | Source], what: str, strict: bool) -> Restored:
    holders = state.holders
    failure: OSError | None = None
    reader: Reader | Source | None = None
    skipped: list[str] = []
    try:
        reader = opened()
        kept = layer_assets.plan(state.model, reader.tensors)
        is_old = isinstance(reader, Reader) and not _has_kept(reader)
        fits, skipped = fitting(state, reader, kept, strict=strict, is_old=is_old)
        # All see that it fits before the first value is changed.
    except OSError as error:
        failure = error
    agree(holders, failure, f"read {what}")
    assert reader is not None
    with log.while_long(f"reading {what}"), contextlib.closing(reader):
        if isinstance(reader, Source):
            reader.plan(fits)
        for name, held in fits:
            if isinstance(reader, Source):
                reader.bring(name)
            failure = failure or tried(lambda: held.put(reading(reader, name, held.dtype)))  # noqa: B023 (called here)
        # Where one has no bytes, no layer takes what it has of them.
        agree(holders, failure, f"read {what}; some variables have its values already")
        is_changed = _load(state, kept, what)
        facts, told = reader.facts, {name: tensor.dtype for name, tensor in reader.tensors.items()}
    _finish(state.model, is_changed)
    own, users = facts.get(OWN), facts.get(_USERS)
    if isinstance(own, dict) and isinstance(own.get("random"), str):
        _go_on_with(own["random"], what)
    converted = [f"{name}: {theirs} -> {held.dtype}" for name, held in fits if (theirs := told[name]) != held.dtype]
    return Restored(reader.step, users if isinstance(users, dict) else {}, tuple(skipped), tuple(converted))


def _has_kept(reader: Reader) -> bool:
    own = reader.facts.get(OWN)
    return isinstance(own, dict) and _KEPT in own


def _load(state: State, kept: layer_assets.Plan, what: str) -> bool:
    is_changed = False

    def load() -> None:
        nonlocal is_changed
        is_changed = kept.load()

    agree(state.holders, tried(load), f"take what layers keep of {what}; variables have its values already")
    return is_changed


def _finish(model: Any, is_changed: bool) -> None:
    for layer in model._flatten_layers():
        # As Keras does after loading: Normalization computes with what it has made of its variables. Layers without
        # any would learn again, of nothing.
        if hasattr(layer, "finalize_state") and layer.variables:
            layer.finalize_state()
            is_changed = True
    if is_changed:
        layer_assets.trace_anew(model)


def _go_on_with(random: str, where: str) -> None:
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

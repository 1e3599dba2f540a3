"""Keeps what layers have beside their variables.

That is vocabularies that `adapt` has learned, tokenizers' files, buffers of torch's modules, and what a class of one's
own saves by `save_assets` or `save_own_variables`.

Keras's own methods write it and read it, files in a folder that is removed. Process 0 says what a step has of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from unidist.backends.protocol import Array
from unidist.checkpoint import assets
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CheckpointError
from unidist.keras.checkpoint import renaming
from unidist.keras.checkpoint.held import OfFirst
from unidist.keras.checkpoint.states import State, agree, by_first, tried
from unidist.keras.layer_facts import is_of_either
from unidist.keras.patching.compat import Layer, TorchModuleWrapper
from unidist.keras.records.layer_report import numbered

Arrays = Mapping[str, Array]
# Of a model that keeps something itself: no layer within it is above it.
_ITSELF = "model"


@dataclass(frozen=True)
class Keeper:
    """A layer that keeps something beside its variables.

    Attributes:
        name: those of the layers that it is in, and its own, with "/" between them.
        layer: the layer.
    """

    name: str
    layer: Any

    def files(self) -> Arrays:
        """Returns what it saves as files, by their paths.

        Raises:
            CheckpointError: it cannot, or they are none that a checkpoint holds.
        """
        if not has_files(self.layer):
            return {}
        with assets.temporary() as folder, self._told("save its files"):
            self.layer.save_assets(folder)
            found = assets.files_in(Path(folder))
            self._check_lines(found.get("vocabulary.txt"))
            return found

    def _check_lines(self, vocabulary: Array | None) -> None:
        """A word of several lines is several words when Keras reads its file."""
        if vocabulary is None or not hasattr(self.layer, "vocabulary_size") or not is_of_either(type(self.layer)):
            return
        lines = len(vocabulary.tobytes().decode().splitlines())
        words = int(self.layer.vocabulary_size())
        if lines != words:
            raise CheckpointError(
                f"{self} has a vocabulary of {words} words, and Keras's file of it has {lines} lines: words that have "
                "a line's end in them are not read back. Take such words out before adapt, or give the layer its "
                "vocabulary when it is made"
            )

    def arrays(self) -> Arrays:
        """Returns what it saves as arrays and has in no variable.

        A collective where a class of one's own computes with whole values.
        """
        if _is_adapted_bins(self.layer):
            return {"bin_boundaries": np.array(self.layer.bin_boundaries, "float64"), "summary": self.layer.summary}
        with self._told("save its arrays"):
            return {key: _array(v) for key, v in self._stored().items() if not isinstance(v, keras.Variable)}

    def _stored(self) -> dict[str, Any]:
        if isinstance(self.layer, TorchModuleWrapper):
            buffers = {name for name, _ in self.layer.module.named_buffers()}
            return {name: v for name, v in self.layer.module.state_dict().items() if name in buffers}
        store: dict[str, Any] = {}
        if _saves_its_own(self.layer):
            self.layer.save_own_variables(store)
        return store

    def stored_whole(self) -> dict[str, Array]:
        """All that it saves as arrays, its variables too. A collective, as they are gathered."""
        with self._told("save its arrays"):
            return {key: _array(v) for key, v in self._stored().items()}

    def load_arrays(self, found: Arrays, now: Arrays) -> None:
        """Takes arrays back. `now`: of `stored_whole`."""
        if _is_bins(self.layer):
            self.layer.bin_boundaries = found["bin_boundaries"].tolist()
            self.layer.summary = found["summary"]
            return
        with self._told("take its arrays"):
            if isinstance(self.layer, TorchModuleWrapper):
                tensors = {k: keras.ops.convert_to_tensor(v, dtype=str(v.dtype)) for k, v in found.items()}
                self.layer.module.load_state_dict(tensors, strict=False)
            else:
                self.layer.load_own_variables({**now, **found})

    def load_files(self, found: Arrays) -> None:
        with assets.temporary() as folder, self._told("take its files"):
            assets.lay_out(Path(folder), found)
            self.layer.load_assets(folder)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self} could not {what}: {type(error).__name__}: {error!s:.500}") from error

    def __str__(self) -> str:
        return f"layer {self.name!r} ({type(self.layer).__name__})"


def has_files(layer: Any) -> bool:
    return hasattr(layer, "save_assets") and hasattr(layer, "load_assets")


def _saves_its_own(layer: Any) -> bool:
    """Returns whether it may save what is no variable.

    Layers of Keras's that have variables save these, if need be as others that they compute of them.
    """
    kind = next(kind for kind in type(layer).__mro__ if "save_own_variables" in vars(kind))
    return kind is not Layer and (not is_of_either(kind) or not layer.variables)


def _is_bins(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Discretization) and layer.num_bins is not None


def _is_adapted_bins(layer: Any) -> bool:
    return _is_bins(layer) and layer.bin_boundaries is not None


def _array(value: Any) -> Array:
    found: Array = np.asarray(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value)
    return found


def keepers(model: Any) -> list[Keeper]:
    """Returns the layers that may keep something beside their variables, in one order on all processes."""
    found: list[Keeper] = []
    names: set[str] = set()
    for name, layer in _walk(model, "", set()):
        may = isinstance(layer, TorchModuleWrapper) or _is_bins(layer) or has_files(layer) or _saves_its_own(layer)
        if may:
            found.append(Keeper(numbered(name or _ITSELF, names), layer))
            names.add(found[-1].name)
    return found


def _walk(layer: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    seen.add(id(layer))
    yield name, layer
    # It hands on what it is asked to this one.
    seen.add(id(getattr(layer, "_lookup_layer", None)))
    # Some are attributes that Keras does not follow, as a task's preprocessor. torch has its modules elsewhere.
    attributes = [*vars(layer).values(), *vars(layer).get("_modules", {}).values()]
    beside = [one for one in attributes if isinstance(one, Layer)]
    for one in (*layer._flatten_layers(include_self=False, recursive=False), *beside):
        if id(one) not in seen:
            yield from _walk(one, f"{name}/{one.name}" if name else one.name, seen)


# writing --------------------------------------------------------------------------------------------------------------


def with_kept(state: State) -> State:
    """A state with what layers keep beside its variables: process 0's. A collective.

    Raises:
        CheckpointError: on all, where a layer cannot save it.
    """
    if not (found := keepers(state.model)):
        return state
    values: dict[str, Array] = {}

    def collect() -> None:
        for keeper in found:
            values.update({assets.array_name(keeper.name, key): v for key, v in keeper.arrays().items()})
            if state.holders.place == 0:
                values.update({assets.file_name(keeper.name, path): v for path, v in keeper.files().items()})

    agree(state.holders, tried(collect), "save what layers keep beside their variables")
    told = by_first(state.holders, lambda: {"tensors": _described(values)})["tensors"]
    own = values if state.holders.place == 0 else {}
    kept = [
        (Tensor(name, dtype, tuple(shape), assets.KIND), OfFirst(tuple(shape), dtype, own.get(name)))
        for name, dtype, shape in told
    ]
    return replace(state, variables=(*state.variables, *kept))


def _described(values: Arrays) -> list[list[Any]]:
    tensors = [Tensor(name, str(value.dtype), value.shape, assets.KIND) for name, value in values.items()]
    assets.check_sizes(tensors)
    for tensor in tensors:
        assets.split(tensor.name)
    return [[one.name, one.dtype, list(one.shape)] for one in tensors]


# reading --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Of:
    arrays: dict[str, OfFirst] = field(default_factory=dict)
    files: dict[str, OfFirst] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Plans what layers will take of a step.

    Attributes:
        fits: name of the tensor -> where it is read to.
        missing: of layers that keep something of which the step has nothing, each with the reason.
        wrong: what the step has for layers that do not take it, each with the reason.
    """

    fits: dict[str, OfFirst]
    missing: list[str]
    wrong: list[str]
    _takers: list[tuple[Keeper, _Of]]

    def load(self) -> bool:
        """Gives layers what was read; returns whether one has changed.

        A collective where a class of one's own saves whole values.

        Raises:
            CheckpointError: a layer does not take it.
        """
        now = {keeper.name: _now(keeper.stored_whole) or {} for keeper, its in self._takers if its.arrays}
        has_changed = False
        for keeper, its in self._takers:
            if its.arrays:
                keeper.load_arrays(_values(its.arrays), now[keeper.name])
                has_changed = True
            # One that has learned nothing saves a file all the same, which Keras does not read.
            if its.files and not _is_same(_now(keeper.files), wanted := _values(its.files)):
                keeper.load_files(wanted)
                has_changed = True
        return has_changed


def plan(model: Any, tensors: Mapping[str, Tensor]) -> Plan:
    """Plans what the layers of a model will take of a checkpoint's tensors.

    Raises:
        CheckpointError: tensors have names that lead out of a folder, or too many bytes.
    """
    kept = {name: tensor for name, tensor in tensors.items() if tensor.kind == assets.KIND}
    assets.check_sizes(kept.values())
    theirs: dict[str, _Of] = {}
    fits: dict[str, OfFirst] = {}
    for name, tensor in kept.items():
        layer, is_file, key = assets.split(name)
        its = theirs.setdefault(layer, _Of())
        one = (its.files if is_file else its.arrays)[key] = OfFirst(tensor.shape, tensor.dtype)
        if is_file and (tensor.dtype != "uint8" or len(tensor.shape) != 1):
            raise CheckpointError(f"tensor {name!r:.200} is a file of {tensor.dtype}, {tensor.shape}", tensor=name)
        fits[name] = one
    ours = {keeper.name: keeper for keeper in keepers(model)}
    there = renaming.of_layers(model, ours, theirs)
    takers = [(keeper, theirs.pop(there[name])) for name, keeper in ours.items() if name in there]
    missing = [f"{name}: {why}" for name, one in ours.items() if name not in there and (why := _alone(one))]
    wrong = [f"{layer}: its files and arrays are in the checkpoint alone" for layer in theirs]
    wrong += [f"{keeper.name}: {why}" for keeper, its in takers if (why := _refused(keeper, its))]
    refused = {line.partition(": ")[0] for line in wrong}
    takers = [(keeper, its) for keeper, its in takers if keeper.name not in refused]
    taken = {id(one) for _, its in takers for one in (*its.arrays.values(), *its.files.values())}
    return Plan({name: one for name, one in fits.items() if id(one) in taken}, missing, wrong, takers)


def _alone(keeper: Keeper) -> str:
    return "its files and arrays are in the model alone" if _now(keeper.arrays) or _now(keeper.files) else ""


def _refused(keeper: Keeper, its: _Of) -> str:
    layer = keeper.layer
    if its.files and (not has_files(layer) or _now(keeper.files) == {}):
        return "has files in the checkpoint, and the layer has what the program gave it"
    if not its.arrays:
        return ""
    if isinstance(layer, TorchModuleWrapper):
        shapes = {key: value.shape for key, value in keeper.arrays().items()}
        found = {key: one.shape for key, one in its.arrays.items()}
        return "" if shapes == found else f"has the buffers {shapes} in the model and {found} in the checkpoint"
    if _is_bins(layer):
        is_whole = {"bin_boundaries", "summary"} == set(its.arrays)
        return "" if is_whole else "has arrays in the checkpoint that are none of a Discretization"
    return "" if _saves_its_own(layer) else "has arrays in the checkpoint, and the layer takes none"


def _now(ask: Any) -> Any:
    """Returns what a layer saves now; None where it cannot, as one that has learned nothing yet."""
    try:
        return ask()
    except CheckpointError:
        return None


def _values(read: Mapping[str, OfFirst]) -> dict[str, Array]:
    return {key: one.value for key, one in read.items() if one.value is not None}


def _is_same(one: Arrays | None, other: Arrays) -> bool:
    return one is not None and one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def trace_anew(model: Any) -> None:
    """Makes compiled steps anew: they have as constants what layers had when they were traced.

    Such are tables of words, bins, means.
    """
    for one in model._flatten_layers():
        for step in ("train", "test", "predict") if isinstance(one, keras.Model) else ():
            if getattr(one, f"{step}_function", None) is not None:
                getattr(one, f"make_{step}_function")(force=True)

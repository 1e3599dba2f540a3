"""A step as a file of Keras's own, for `unidist checkpoint export`: one variable after the other.

The model is made of the config that `save` has noted, and its large variables have no values: who reads one gets it
from the checkpoint. So Keras's own writer holds one of them at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import keras

from unidist.backends.protocol import itemsize
from unidist.checkpoint import disk
from unidist.checkpoint.directory import Step
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.regions import whole
from unidist.checkpoint.tensors import Tensor
from unidist.errors import CheckpointError
from unidist.keras import atomic_files, model_config
from unidist.keras.checkpoint import layer_assets
from unidist.keras.checkpoint.fitting import noted, problem, reading
from unidist.keras.checkpoint.held import Whole, entries
from unidist.keras.checkpoint.states import named
from unidist.keras.patching.compat import TorchLayer, saving_lib
from unidist.keras.patching.patches import Hook, Table, by, calling

# Smaller variables are made as ever: some have values that no checkpoint needs to have, as a metric's.
_SMALL_BYTES = 1 << 16
_WEIGHTS = ".weights.h5"
_REMEDY = "make the model in a program, and let unidist.restore and model.save write the file"


def export(directory: str | Path, step: Step, out: Path) -> None:
    """Writes a step's model as `.keras`, or its weights as `.weights.h5`.

    Args:
        directory: of the checkpoints, or a step's folder.
        step: its number, or "latest".
        out: a file that is not there yet. With `.keras` the optimizer comes along, if the model was compiled.

    Raises:
        CheckpointError: the checkpoint does not have the model's config, or Keras cannot make the model of it; what is
            read is damaged; or the system cannot write.
    """
    if not out.name.endswith((".keras", _WEIGHTS)):
        raise CheckpointError(f"{out}: Keras's files end with .keras or {_WEIGHTS}", file=str(out))
    if out.exists():
        raise CheckpointError(f"{out}: is there already", file=str(out))
    with Reader(directory, step) as reader, _lazy() as initializers, model_config.without_tensorflow(), disk.told(out):
        text, names = _told_of(reader)
        model = _model_of(reader, text, is_compiled=out.suffix == ".keras")
        _fill(model, reader, names, initializers)
        _keep(model, reader)
        if out.name.endswith(_WEIGHTS):
            model.save_weights(out)
        else:
            model.save(out)


def _told_of(reader: Reader) -> tuple[str, list[str]]:
    text, names = noted(reader)
    if isinstance(text, str):
        return text, names
    raise CheckpointError(f"{reader.folder}: has no config of the model, which Keras could read: {_REMEDY}")


def _model_of(reader: Reader, text: str, *, is_compiled: bool) -> Any:
    try:
        return model_config.model_of(text, is_compiled=is_compiled)
    # Classes of anybody's are called with arguments from a file.
    except Exception as error:
        told = f"{type(error).__name__}: {error!s:.500}"
        text = f"Keras cannot make the model of its config ({told}): {_REMEDY}"
        raise CheckpointError(f"{reader.folder}: {text}") from error


def _fill(model: Any, reader: Reader, names: list[str], initializers: dict[int, Any]) -> None:
    for name, held in _fitting(model, reader, names):
        if initializers.pop(id(held.variable), None) is None:
            held.put(reading(reader, name, held.dtype))
        else:
            held.variable._initializer = _later(reader, name, held)
    for variable in [*model.variables, *model.metrics_variables]:
        if id(variable) in initializers:
            variable._initializer = initializers[id(variable)]


def _keep(model: Any, reader: Reader) -> None:
    """Gives layers what they keep beside their variables.

    Raises:
        CheckpointError: the step has some for layers that Keras does not make.
    """
    kept = layer_assets.plan(model, reader.tensors)
    if kept.wrong:
        raise CheckpointError(f"{reader.folder}: {'; '.join(kept.wrong[:5])}: {_REMEDY}")
    for name, one in kept.fits.items():
        one.put(reading(reader, name, one.dtype))
    kept.load()


def _fitting(model: Any, reader: Reader, names: list[str]) -> Iterator[tuple[str, Whole]]:
    """(name in the checkpoint, variable), kind by kind, in their order.

    Raises:
        CheckpointError: weights do not fit, or the optimizer's variables.
    """
    ours = [(tensor, held) for tensor, held in named(model, Whole) if isinstance(held, Whole)]
    theirs = [reader.tensors[name] for name in names if name in reader.tensors]
    for kind in ("model", "optimizer", "state"):
        own = [(tensor, held) for tensor, held in ours if tensor.kind == kind]
        stored = [tensor for tensor in theirs if tensor.kind == kind]
        # Without `compile` there is no optimizer; one that has taken no step has no more than its count.
        if kind == "optimizer" and (not own or len(stored) < len(own)):
            continue
        wrong = [f"{len(stored)} in the checkpoint, {len(own)} in the model"] if len(stored) != len(own) else []
        pairs = list(zip(stored, own, strict=False))
        wrong += [f"{a.name}: {found}" for a, (b, _) in pairs if (found := _difference(a, b))]
        if wrong and kind != "state":
            text = f"variables of kind {kind!r} are not those that Keras makes: {'; '.join(wrong[:5])}: {_REMEDY}"
            raise CheckpointError(f"{reader.folder}: {text}")
        if not wrong:
            yield from ((tensor.name, held) for tensor, (_, held) in pairs)


def _difference(stored: Tensor, own: Tensor) -> str:
    """Paths differ by what a layer was built in: Keras builds those of a config by themselves."""
    a, b = (tensor.name.partition("#")[0].rpartition("/")[2] for tensor in (stored, own))
    return problem(own, stored) or ("" if a.endswith(b) or b.endswith(a) else f"is {own.name} in the model")


def _later(reader: Reader, name: str, held: Whole) -> Any:
    def read(shape: Any, dtype: Any) -> Any:
        found = reading(reader, name, held.dtype)(whole(held.shape), None)
        return held.variable._convert_to_tensor(entries(found, held.dtype), dtype=held.dtype)

    return read


@contextlib.contextmanager
def _lazy() -> Iterator[dict[int, Any]]:
    """Makes large variables, inside, without values: they are zeros where shapes are inferred.

    Yields:
        The initializers that they were to have, by the variables' ids.
    """
    initializers: dict[int, Any] = {}

    @calling
    def defer(original: Any, self: Any, initializer: Any) -> None:
        if prod(self._shape) * itemsize(self._dtype) < _SMALL_BYTES:
            original(self, initializer)
            return
        initializers[id(self)] = initializer
        self._value, self._initializer = None, keras.initializers.Zeros()

    hooks = [
        Hook(keras.Variable, "_initialize_with_initializer", defer, "variables that are read when they are written"),
        Hook(keras.optimizers.Optimizer, "_var_key", by(lambda self, one: id(one)), "no value is a key"),
        Hook(saving_lib, "is_memory_sufficient", by(lambda model: False), "no file is held in memory"),
        *model_config.hooks(),
        *atomic_files.hooks(),
    ]
    if keras.config.backend() == "torch":
        hooks.append(Hook(TorchLayer, "_track_variables", by(lambda self: None), "torch's modules would hold values"))
    table = Table(hooks)
    table.turn_on()
    try:
        yield initializers
    finally:
        table.turn_off()

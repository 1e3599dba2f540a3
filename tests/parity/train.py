"""What the processes of the parity suite run: plain Keras training, with or without a strategy around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.parity import models
from tests.parity.models import CASES, Case
from tests.support.clearing import cleared

Weights = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """A strategy that another process can make.

    Attributes:
        kind: "data" for DataParallel, "model" for ModelParallel with the case's rules, "auto" for one with none.
        axes: the mesh.
        devices: the ranks at its places; None: in order.
        zero: the stage of ZeRO.
        offload: what rests in host memory.
    """

    kind: str
    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...] | None = None
    zero: int = 0
    offload: Literal["none", "states"] = "none"

    @property
    def name(self) -> str:
        stage = (f"-zero{self.zero}" if self.zero else "") + ("-offload" if self.offload != "none" else "")
        return self.kind + "-" + "x".join(f"{axis}{size}" for axis, size in self.axes) + stage

    @property
    def shape(self) -> str:
        """The kind and the axes, without their sizes."""
        return "-".join((self.kind, *(axis for axis, _ in self.axes)))

    def size(self, axis: str) -> int:
        return dict(self.axes).get(axis, 1)


@dataclass(frozen=True)
class Variable:
    """A row of `describe`, as plain data."""

    path: str
    shape: tuple[int, ...]
    layout: str
    local_shape: tuple[int, ...]
    bytes_per_device: int
    is_sharded: bool


@dataclass
class Result:
    """What a training came to, seen by one process."""

    start: Weights
    logs: list[dict[str, float]]
    weights: Weights
    evaluate: dict[str, float]
    predict: dict[str, Any]
    variables: list[Variable] = field(default_factory=list)
    traffic: dict[str, tuple[int, float]] = field(default_factory=dict)
    trainable_bytes: int = 0

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.logs]


def start(backend: str | None, devices: int | None) -> None:
    """Makes the process ready. None: Keras alone, as a user has it without unidist."""
    if backend is not None:
        import unidist

        unidist.use(backend, devices=devices)
    import keras

    keras.utils.disable_interactive_logging()


def strategy_of(spec: Spec, case: Case) -> Any:
    import unidist

    mesh = unidist.Mesh(dict(spec.axes), spec.devices)
    if spec.kind == "data":
        return unidist.DataParallel(mesh, zero=spec.zero, offload=spec.offload)
    rules = "auto" if spec.kind == "auto" else unidist.LayoutMap(mesh, case.rules)
    return unidist.ModelParallel(mesh, rules, zero=spec.zero, offload=spec.offload)


@contextlib.contextmanager
def distributed(spec: Spec | None, case: Case) -> Iterator[None]:
    """Inside, models are built and trained by the strategy; None: on one device."""
    if spec is None:
        yield
        return
    with strategy_of(spec, case).scope():
        yield


def compiled(case: Case, **options: Any) -> Any:
    model = case.build()
    model.compile(optimizer=models.optimizer(case.optimizer), loss=models.losses(case), **case.compile, **options)
    return model


def build(model: Any, case: Case, data: dict[str, Any]) -> None:
    """Calls a model that no Input has built, as users do; those that are built late are left to fit."""
    if not model.built and not case.late:
        model(data["x"][:2])


# Whose strategies make the optimizer's variables within the first step on TensorFlow too, as users' programs do.
BUILT_BY_FIT = "mlp_ragged_adam"


def train(name: str, spec: Spec | None, *, numpy_weights: bool = False, **options: Any) -> Result:
    """Trains a case, then evaluates and predicts.

    Args:
        numpy_weights: the first weights come from NumPy instead of Keras's initializers, which draw other numbers on
            each Keras backend.
        options: further arguments of `compile`.
    """
    import keras

    cleared()
    keras.utils.set_random_seed(7)
    case = CASES[name]
    data = case.data()
    with distributed(spec, case):
        model = compiled(case, **options)
        build(model, case, data)
        if numpy_weights:
            model.set_weights(weights_from_numpy(model))
        first = weights_of(model, spec)
        if (spec is None or name != BUILT_BY_FIT) and model.built and keras.config.backend() == "tensorflow":
            # A step that builds its optimizer is traced twice.
            model.optimizer.build(model.trainable_variables)
        logs, traffic = fitted(model, case, data)
        return Result(
            start=first,
            logs=logs,
            weights=weights_of(model, spec),
            evaluate=evaluated(model, case, data),
            predict=predicted(model, case, data),
            variables=variables_of(model, spec),
            traffic=traffic,
            trainable_bytes=sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables),
        )


def train_loosely(name: str, spec: Spec) -> Result:
    """Trains a case while every tensor that can moves by itself, as large ones do."""
    from unidist.keras.torch.params import flat_buffer

    usual, flat_buffer.LOOSE_BYTES = flat_buffer.LOOSE_BYTES, 1
    try:
        return train(name, spec)
    finally:
        flat_buffer.LOOSE_BYTES = usual


def fitted(
    model: Any, case: Case, data: dict[str, Any], **options: Any
) -> tuple[list[dict[str, float]], dict[str, tuple[int, float]]]:
    """(logs of each step, op -> (count, bytes per rank) of what was sent)."""
    import keras

    import unidist

    seen: list[dict[str, float]] = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append({key: float(value) for key, value in logs.items()})

    settings = {"batch_size": case.batch, "epochs": case.epochs, "shuffle": case.shuffle, "verbose": 0, **options}
    callbacks = [Recorder(), *settings.pop("callbacks", ())]
    with unidist.ledger() as book:
        model.fit(**data, **settings, callbacks=callbacks)
    ops = dict.fromkeys(event.op for event in book.events)
    return seen, {op: (book.count(op), float(book.bytes(op))) for op in ops}


def evaluated(model: Any, case: Case, data: dict[str, Any]) -> dict[str, float]:
    """Where each size of batches is a program more: of full batches."""
    import keras

    known = {key: data[key] for key in ("x", "y", "sample_weight") if key in data}
    if keras.config.backend() != "torch":
        full = _rows(data) // case.batch * case.batch
        known = keras.tree.map_structure(lambda value: value[:full], known)
    found = model.evaluate(**known, batch_size=case.batch, verbose=0, return_dict=True)
    return {key: float(value) for key, value in found.items()}


def predicted(model: Any, case: Case, data: dict[str, Any]) -> dict[str, Any]:
    """Where each size of batches is a program more: of two, which four devices mostly do not divide."""
    import keras

    batch = case.batch if keras.config.backend() == "torch" else -(-_rows(data) // 2)
    found = model.predict(data["x"], batch_size=batch, verbose=0)
    return dict(found) if isinstance(found, dict) else {"y": found}


def _rows(data: dict[str, Any]) -> int:
    import keras

    return len(keras.tree.flatten(data["x"])[0])


def weights_from_numpy(model: Any) -> list[Any]:
    rng = np.random.default_rng(11)
    return [
        np.asarray(v).astype(v.dtype)
        if not v.trainable
        else rng.normal(scale=0.3, size=tuple(v.shape)).astype("float32")
        for v in model.weights
    ]


def weights_of(model: Any, spec: Spec | None) -> Weights:
    """The full values by path."""
    if spec is None:
        return {v.path: np.array(v) for v in model.weights}
    import unidist

    return unidist.gather_weights(model)


def variables_of(model: Any, spec: Spec | None) -> list[Variable]:
    if spec is None:
        return []
    import unidist

    return [
        Variable(row.path, row.shape, str(row.layout), row.local_shape, row.bytes_per_device, row.is_sharded)
        for row in unidist.describe(model).rows
    ]


# saving and loading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A training that was saved: what was gathered, and which files each process found afterwards."""

    weights: Weights
    files: list[str]
    predict: dict[str, Any]


def save(name: str, spec: Spec | None, folder: str) -> Saved:
    """Trains and saves the model, its weights alone, and a checkpoint at each epoch."""
    import keras

    cleared()
    keras.utils.set_random_seed(7)
    case, data = CASES[name], CASES[name].data()
    place = Path(folder)
    with distributed(spec, case):
        model = compiled(case)
        build(model, case, data)
        at_epochs = keras.callbacks.ModelCheckpoint(str(place / "epoch{epoch}.keras"))
        fitted(model, case, data, callbacks=[at_epochs])
        model.save(place / "model.keras")
        model.save_weights(place / "model.weights.h5")
        files = sorted(path.name for path in place.iterdir())
        return Saved(weights_of(model, spec), files, predicted(model, case, data))


def load_and_go_on(name: str, spec: Spec | None, folder: str) -> Result:
    """Loads the saved model, optimizer included, predicts, and trains it on."""
    import keras

    cleared()
    keras.utils.set_random_seed(8)
    case, data = CASES[name], CASES[name].data()
    with distributed(spec, case):
        model = keras.models.load_model(Path(folder) / "model.keras")
        first, before = weights_of(model, spec), predicted(model, case, data)
        logs, traffic = fitted(model, case, data)
        return Result(
            start=first,
            logs=logs,
            weights=weights_of(model, spec),
            evaluate={},
            predict=before,
            variables=variables_of(model, spec),
            traffic=traffic,
        )


def load_weights(name: str, spec: Spec | None, folder: str) -> Weights:
    import keras

    cleared()
    keras.utils.set_random_seed(8)
    case, data = CASES[name], CASES[name].data()
    with distributed(spec, case):
        model = compiled(case)
        build(model, case, data)
        model.load_weights(Path(folder) / "model.weights.h5")
        return weights_of(model, spec)

"""Makes one run of a comparison in its own process or processes.

`python -m unidist.parity.worker SPEC.json`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from unidist import session
from unidist.algebra import Mesh
from unidist.backends.protocol import Array
from unidist.parity.spec import ParityError, Spec

INITIAL = "initial.npz"
RESULT = "result.npz"


class _Done(Exception):  # noqa: N818 (no error: the steps that were asked for are done)
    pass


def main(arguments: list[str]) -> None:
    """Runs the spec of a file and leaves RESULT in its folder."""
    spec = Spec.read(arguments[0])
    mesh, writes = None, True
    if spec.backend is not None:
        adapter = session.use(spec.backend, devices=None if spec.by_processes else spec.size)
        mesh, writes = Mesh(spec.mesh), adapter.process_index() == 0
    function = _function(spec.target)
    recorder = _Recorder(spec, writes)
    with _watched(recorder), contextlib.suppress(_Done):
        if inspect.signature(function).parameters:
            function(mesh)
        elif mesh is None:
            function()
        else:
            with _strategy(mesh).scope():
                function()
    if not recorder.losses:
        raise ParityError(f"{spec.target!r} trained nothing: it must call fit of a keras.Model")
    if writes:
        recorder.save()


def _function(target: str) -> Callable[..., Any]:
    file, _, name = target.rpartition(":")
    found = importlib.util.spec_from_file_location(Path(file).stem, file)
    if found is None or found.loader is None:
        raise ParityError(f"{target!r}: {file!r} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.path.insert(0, str(Path(file).resolve().parent))
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ParityError(f"{target!r}: {file!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _strategy(mesh: Mesh) -> Any:
    from unidist.keras.strategies.strategy import DataParallel, ModelParallel

    return DataParallel(mesh) if mesh.axis_names in (("data",), ("batch",)) else ModelParallel(mesh)


class _Recorder:
    def __init__(self, spec: Spec, writes: bool) -> None:
        self.spec = spec
        self.writes = writes
        self.losses: list[float] = []
        self.weights: list[list[Array]] = []
        self.paths: list[str] = []

    def begin(self, model: Any) -> None:
        """All runs begin with one run's weights: random initial values are each framework's own."""
        if self.paths:
            return
        from unidist.keras.api.models import gather_weights

        path = Path(self.spec.folder) / INITIAL
        if self.spec.initial is None:
            np.savez(path, *[np.asarray(w) for w in model.get_weights()])
        else:
            with np.load(self.spec.initial) as held:
                model.set_weights([held[name] for name in held.files])
        self.paths = list(gather_weights(model))

    def step(self, model: Any, logs: dict[str, Any]) -> None:
        from unidist.keras.api.models import gather_weights

        self.losses.append(float(logs["loss"]))
        self.weights.append(list(gather_weights(model).values()))
        if len(self.losses) == self.spec.steps:
            raise _Done

    def save(self) -> None:
        arrays = {f"w{step}_{k}": w for step, held in enumerate(self.weights) for k, w in enumerate(held)}
        np.savez(
            Path(self.spec.folder) / RESULT,
            losses=np.asarray(self.losses),
            paths=np.asarray(self.paths),
            **arrays,  # type: ignore[arg-type]
        )


@contextlib.contextmanager
def _watched(recorder: _Recorder) -> Iterator[None]:
    import keras

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            recorder.begin(self.model)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            recorder.step(self.model, logs)

    original = keras.Model.fit
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        callbacks = bound.arguments.get("callbacks") or []
        given = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        bound.arguments |= {"callbacks": [*given, Watch()], "shuffle": False, "verbose": 0}
        return original(*bound.args, **bound.kwargs)

    keras.Model.fit = fit
    try:
        yield
    finally:
        keras.Model.fit = original


if __name__ == "__main__":
    main(sys.argv[1:])

"""Mistakes that users make with Keras and unidist; each returns the error that they get."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.support.clearing import cleared

Told = tuple[str, str]


def told_by(action: Callable[[], Any]) -> Told:
    """(type, text) of the UnidistError that an action raises. Another error goes through."""
    import unidist

    try:
        action()
    except unidist.UnidistError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _model(units: int = 8) -> Any:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, name="wide")], name="net")
    model.compile("sgd", "mse")
    return model


def parts_of_sequences() -> Told:
    import unidist

    return told_by(lambda: unidist.ModelParallel(unidist.Mesh({"model": 4}), sequence_parallel=True))


def _train(mesh: dict[str, int], rules: dict[str, Any], units: int = 8) -> None:
    import unidist

    grid = unidist.Mesh(mesh)
    strategy = unidist.ModelParallel(grid, unidist.LayoutMap(grid, rules))
    with strategy.scope():
        model = _model(units)
        model.fit(np.ones((8, 4), "float32"), np.ones((8, units), "float32"), batch_size=4, verbose=0)


def rule_that_matches_nothing() -> Told:
    return told_by(lambda: _train({"model": 4}, {"wide.*kernell": (None, "model")}))


def rule_that_matches_part_of_a_path() -> Told:
    return told_by(lambda: _train({"model": 4}, {"wide": (None, "model")}))


def two_rules_for_one_variable() -> Told:
    return told_by(lambda: _train({"model": 4}, {".*kernel": (None, "model"), ".*wide/.*": ("model",)}))


def clear_session_in_a_scope() -> tuple[float, float]:
    """Bytes that are sent for a model made before clear_session, and for one made after it in the same scope."""
    import keras

    import unidist

    x, sent = np.ones((8, 4), "float32"), []
    keras.distribution.set_distribution(None)
    with unidist.DataParallel().scope():
        for _ in range(2):
            model = _model()
            cleared()
            with unidist.ledger() as book:
                model.fit(x, np.ones((8, 8), "float32"), batch_size=4, verbose=0)
            sent.append(float(book.bytes()))
    assert keras.distribution.distribution() is None
    return sent[0], sent[1]


def unknown_axis() -> Told:
    return told_by(lambda: _train({"data": 2, "model": 2}, {".*kernel": (None, "modle")}))


def one_axis_on_two_dims() -> Told:
    return told_by(lambda: _train({"model": 4}, {".*kernel": ("model", "model")}))


def dim_that_does_not_divide() -> Told:
    return told_by(lambda: _train({"model": 4}, {".*kernel": (None, "model")}, units=6))


def more_dims_than_the_variable() -> Told:
    return told_by(lambda: _train({"model": 4}, {".*bias": (None, "model")}))


def mesh_larger_than_the_world() -> Told:
    import unidist

    return told_by(lambda: unidist.DataParallel(unidist.Mesh({"data": 64})))


def mesh_smaller_than_the_world() -> Told:
    import unidist

    return told_by(lambda: unidist.DataParallel(unidist.Mesh({"data": 3})))


def _warned(train: Callable[[], None]) -> list[tuple[str, bool]]:
    """The warnings of unidist, and whether each names a line of this file."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train()
    ours = [one for one in told if re.search(r"has no strategy|nothing is cut", str(one.message))]
    return [(str(one.message), one.filename == __file__) for one in ours]


def model_outside_of_the_scope() -> tuple[list[tuple[str, bool]], float]:
    """Warnings for one that is trained twice, with others that have a strategy; bytes that were sent for it."""
    import unidist

    sent: list[float] = []

    def fit(model: Any) -> None:
        with unidist.ledger() as book:
            model.fit(np.ones((8, 4), "float32"), np.ones((8, 8), "float32"), batch_size=4, verbose=0)
        sent.append(float(book.bytes()))

    def train() -> None:
        strategy = unidist.DataParallel()
        model = _model()
        fit(model)
        fit(model)
        with strategy.scope():
            fit(_model())
        fit(unidist.parallelize(_model(), strategy))

    warned = _warned(train)
    assert min(sent[2:]) > 0
    return warned, max(sent[:2])


def layouts_that_cut_nothing() -> list[tuple[str, bool]]:
    import keras

    import unidist

    def train() -> None:
        for units in (3, 8):
            with unidist.ModelParallel(unidist.Mesh({"model": 4})).scope():
                model = keras.Sequential(
                    [keras.Input((5,)), keras.layers.Dense(units, name="wide")], name=f"of_{units}"
                )
                model.compile("sgd", "mse")
            for _ in range(2):
                model.fit(np.ones((8, 5), "float32"), np.ones((8, units), "float32"), batch_size=4, verbose=0)
            assert bool(unidist.describe(model).sharded) == (units == 8)

    return _warned(train)


def mesh_without_a_process() -> Told:
    import unidist

    return told_by(lambda: unidist.DataParallel(unidist.Mesh({"data": 2}, [0, 1])))


def array_without_a_process() -> Told:
    """On a mesh of the first process alone."""
    import unidist

    mesh = unidist.Mesh({"data": 2}, [0, 1])
    return told_by(lambda: unidist.distribute(np.ones(4, "float32"), mesh, unidist.Layout("data")))


def more_devices_than_there_are() -> Told:
    import unidist

    return told_by(lambda: unidist.TensorParallelKeras(_model(), world_size=8))


def optimizer_of_torch_before_layouts_are_found() -> Told:
    """The first call finds them, and moves what was cut by its shape alone."""
    import keras
    import torch

    import unidist

    cleared()
    with unidist.ModelParallel(unidist.Mesh({"data": 1, "model": 2})).scope():
        layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).sum().backward()
    return told_by(optimizer.step)


def stateful_layer() -> Told:
    """With the batch shape that it needs, in data parallel."""
    import keras

    import unidist

    layers = [keras.Input(batch_shape=(6, 3, 4)), keras.layers.SimpleRNN(2, stateful=True, name="memory")]

    def train() -> None:
        with unidist.DataParallel().scope():
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        model.fit(np.ones((12, 3, 4)), np.ones((12, 2)), batch_size=6, verbose=0)

    return told_by(train)


def float8_training() -> Told:
    """Evaluating asks for no gradients."""
    import keras

    import unidist

    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="narrow")])
        model.quantize("float8")
        model.compile("sgd", "mse")
    x, y = np.ones((8, 4)), np.ones((8, 2))
    model.evaluate(x, y, verbose=0)
    return told_by(lambda: model.fit(x, y, verbose=0))


def float8_elsewhere(way: str) -> Told:
    """In a loop of one's own, before or behind a fit; on parts of sequences."""
    import keras
    import torch

    import unidist

    is_parts = way == "parts"
    mesh = unidist.Mesh({"model": 2})
    strategy = unidist.ModelParallel(mesh, sequence_parallel=True) if is_parts else unidist.DataParallel()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3, 4)), keras.layers.Dense(2, name="narrow")])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.quantize("float8")
        model.compile("sgd", "mse")
    x, y = np.ones((8, 3, 4), "float32"), np.ones((8, 3, 2), "float32")
    if is_parts:
        return told_by(lambda: model.fit(x, y, verbose=0))
    if way == "later":
        model.fit(x, y, verbose=0)
    loss = (model(torch.as_tensor(x), training=True) - 1).square().mean()
    if way == "grad":
        return told_by(lambda: torch.autograd.grad(loss, [v.value for v in model.trainable_weights]))
    return told_by(loss.backward)


def gathering() -> list[str]:
    """What steps say at WARNING of a layer that sorts the rows of a batch."""
    import keras

    import unidist

    class Ranked(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return keras.ops.sort(x, axis=0)

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unidist").addHandler(handler)
    try:
        with unidist.DataParallel().scope():
            model = keras.Sequential([keras.Input((4,)), Ranked(), keras.layers.Dense(2)], name="net")
            model.compile("sgd", "mse")
        model.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, epochs=2, verbose=0)
    finally:
        logging.getLogger("unidist").removeHandler(handler)
    return said


def another_backend(name: str) -> Told:
    import keras

    import unidist

    assert keras.backend.backend()
    return told_by(lambda: unidist.use(name))


def second_initialize() -> Told:
    import unidist

    unidist.initialize()
    return told_by(unidist.initialize)


def initialize_against_the_launcher() -> Told:
    import unidist

    return told_by(lambda: unidist.initialize(process_count=7))


def distributed_in_two_ways() -> Told:
    import unidist

    def twice() -> None:
        model = _model()
        unidist.parallelize(model, unidist.DataParallel(unidist.Mesh({"data": 4})))
        mesh = unidist.Mesh({"model": 4})
        unidist.parallelize(model, unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, {".*kernel": (None, "model")})))

    return told_by(twice)


def not_built() -> Told:
    import keras

    import unidist

    return told_by(
        lambda: unidist.parallelize(
            keras.Sequential([keras.layers.Dense(4)]), unidist.DataParallel(unidist.Mesh({"data": 4}))
        )
    )


# a process that is lost -----------------------------------------------------------------------------------------------


def lose_a_process(lost: int, folder: str) -> None:
    """Kills process `lost` in the middle of fit. The others write "type: text" and the seconds that it took, and end
    as a script does that does not catch its error."""
    import keras

    import unidist

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and unidist.process_index() == lost:
                _die(folder)

    with unidist.DataParallel().scope():
        model = _model()
    x, y = np.ones((64, 4), "float32"), np.ones((64, 8), "float32")
    _until_lost(lambda: model.fit(x, y, batch_size=4, epochs=50, verbose=0, callbacks=[Kill()]), folder)


def lose_a_process_amid_rows(lost: int, folder: str) -> None:
    """Kills process `lost` where the others send rows to their experts and wait for its own."""
    import unidist
    from tests.keras import experts
    from unidist.keras.torch.layers.sending import Sending

    original, calls = Sending._sent, iter(range(100_000))

    def sent(self: Any, x: Any, *sizes: Any) -> Any:
        if unidist.process_index() == lost and next(calls) > 30 and x.ndim > 1:
            _die(folder)
        return original(self, x, *sizes)

    strategy = unidist.ModelParallel(unidist.Mesh({"expert": -1}), experts="dispatch")
    with strategy.scope(), mock.patch.object(Sending, "_sent", sent):
        model = experts.net()
        model.compile("sgd", "mse")
        x, y = np.ones((8, experts.LENGTH), "int32"), np.ones((8, experts.LENGTH, experts.WORDS), "float32")
        _until_lost(lambda: model.fit(x, y, batch_size=4, epochs=50, verbose=0), folder)


def _die(folder: str) -> None:
    (Path(folder) / "killed").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def _until_lost(fit: Callable[[], object], folder: str) -> None:
    import unidist

    try:
        fit()
    except unidist.ProcessLostError as error:
        seconds = time.time() - float((Path(folder) / "killed").read_text())
        (Path(folder) / f"told-{unidist.process_index()}").write_text(f"{seconds}\n{error}")
        raise SystemExit(1) from error


def raises_in_a_callback(hook: str) -> Told:
    """Process 1, in the middle of fit; there the program catches it and goes on to something else."""
    import keras

    import unidist

    second = unidist.process_index() == 1

    def raises(batch: int, logs: Any = None) -> None:
        if second and batch == 2:
            raise OSError("no space left for this callback")

    callback = keras.callbacks.Callback()
    setattr(callback, hook, raises)
    with unidist.DataParallel().scope():
        model = _model()

    def train() -> None:
        x, y = np.ones((64, 4), "float32"), np.ones((64, 8), "float32")
        with contextlib.suppress(OSError):
            model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback])
        unidist.barrier()

    return told_by(train)


def apart_at_the_gate() -> Told:
    """Each process comes to something else, and no collective follows that would hang without a gate."""
    import unidist
    from unidist.keras.tensorflow import worlds

    def come() -> None:
        with worlds.together(f"what process {unidist.process_index()} does"):
            pass

    return told_by(come)


def stall(how: str, folder: Path) -> Told:
    """Process 1 stops in the middle of fit, alive, until process 0 has raised; or goes another way."""
    import keras

    import unidist
    from unidist.keras.tensorflow import worlds

    second, raised = unidist.process_index() == 1, folder / how

    class Stall(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and how == "late":
                worlds.backend().world.gate.timeout = 1.0
                while second and not raised.exists():
                    time.sleep(0.02)
            if second and batch == 3 and how == "elsewhere":
                np.asarray(self.model.weights[0])

    with unidist.DataParallel(zero=3).scope():
        model = _model()
    x, y = np.ones((64, 4), "float32"), np.ones((64, 8), "float32")
    size = 8 if second and how == "another batch" else 4
    told = told_by(lambda: model.fit(x, y, batch_size=size, verbose=0, callbacks=[Stall()]))
    raised.touch()
    return told

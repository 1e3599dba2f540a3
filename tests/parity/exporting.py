"""What the tests of exports to Keras's files run in processes: `unidist checkpoint export`, and Keras's loading."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tests.parity.train import Spec
from tests.support.clearing import cleared


def _rows() -> Any:
    return np.random.default_rng(3).normal(size=(8, 6)).astype("float32")


def train(folder: str, spec: Spec) -> Any:
    """Writes a checkpoint of a distributed model that has taken a step; its predictions."""
    import keras

    import unidist

    cleared()
    keras.utils.set_random_seed(5)
    mesh = unidist.Mesh(dict(spec.axes), spec.devices)
    # The first layer is large enough to be read when it is written.
    rules = {".*wide/kernel": (None, "model"), ".*back/kernel": ("model", None)}
    with unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules), zero=spec.zero).scope():
        wide, back = keras.layers.Dense(3000, "relu", name="wide"), keras.layers.Dense(2, name="back")
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), wide, back], name="net")
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    model.fit(_rows(), _rows()[:, :2], batch_size=8, verbose=0)
    unidist.save(model, folder)
    return np.asarray(model.predict(_rows(), verbose=0))


def export(folder: str, out: str) -> tuple[int, int]:
    """(exit code, what it held at most beside what it held before, in bytes)."""
    from unidist import cli

    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    code = cli.main(["checkpoint", "export", folder, out])
    return code, _status("VmHWM") - before


def load(out: str) -> tuple[Any, int, int]:
    """(predictions, steps of the optimizer, its variables) of a file that Keras loads."""
    import keras

    model = keras.saving.load_model(out)
    count = len(model.optimizer.variables)
    return np.asarray(model.predict(_rows(), verbose=0)), int(np.asarray(model.optimizer.iterations)), count


def write_large(folder: str) -> int:
    """Writes a checkpoint of 13 kernels of a MiB with Adam's slots; the bytes of all."""
    import keras

    import unidist

    cleared()
    model = keras.Sequential([keras.Input((512,)), *(keras.layers.Dense(512, use_bias=False) for _ in range(13))])
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    model.optimizer.build(model.trainable_variables)
    unidist.save(model, folder)
    return 39 << 20


def restore_scaling(folder: str) -> tuple[Any, Any]:
    """Predictions of a model that normalizes, and of one that was restored from its checkpoint."""
    import keras

    import unidist

    found = []
    for is_adapted in (True, False):
        cleared()
        model = keras.Sequential([keras.Input((6,)), keras.layers.Normalization(name="scale")], name="scaling")
        if is_adapted:
            model.layers[0].adapt(3 * _rows() + 2)
            unidist.save(model, folder, step=1)
        else:
            # Its compiled step has what it has learned here.
            model.layers[0].adapt(_rows())
            model.predict(_rows(), verbose=0)
        unidist.restore(model, folder)
        found.append(np.asarray(model.predict(_rows(), verbose=0)))
    return found[0], found[1]


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def write_by_orbax(folder: str) -> tuple[list[int], float]:
    """Keras's OrbaxCheckpoint, with a stand-in for Orbax: (the steps that this process wrote, how far the last kernel
    there is from the model's whole one)."""
    import keras
    from keras.src.callbacks import orbax_checkpoint

    import unidist

    cleared()
    written: dict[int, Any] = {}

    class Checkpointer:
        def __init__(self, **options: Any) -> None:
            self.close = lambda: None

        def save_checkpointables(self, step: int, payload: Any) -> None:
            (Path(folder) / str(step)).touch(exist_ok=False)
            written[step] = payload["pytree"]["trainable_variables"]["net"]["wide"]["kernel"]

    policies = SimpleNamespace(LatestN=lambda n: n, FixedIntervalPolicy=lambda n: n)
    training = SimpleNamespace(
        Checkpointer=Checkpointer, preservation_policies=policies, save_decision_policies=policies
    )
    orbax = SimpleNamespace(initialize=lambda: None, Context=contextlib.nullcontext, training=training)
    with mock.patch.object(orbax_checkpoint, "ocp", orbax):
        with unidist.DataParallel(zero=3).scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="wide")], name="net")
            model.compile("adam", "mse")
        callback = keras.callbacks.OrbaxCheckpoint(folder)
        model.fit(_rows(), _rows()[:, :4], epochs=2, batch_size=4, verbose=0, callbacks=[callback])
    whole = np.asarray(model.layers[0].kernel)
    return sorted(written), float(np.abs(written[1] - whole).max()) if written else 0.0


def save_without_variables(folder: str) -> int:
    """How many files this process writes of a model that computes without variables, and of one that is not built."""
    import keras

    import unidist
    from unidist.keras import atomic_files

    cleared()
    with (
        unidist.DataParallel().scope(),
        mock.patch.object(atomic_files, "_to_the_disk", wraps=atomic_files._to_the_disk) as written,
    ):
        keras.Sequential([keras.Input((6,)), keras.layers.Rescaling(2.0)]).save(Path(folder) / "computes.keras")
        keras.Sequential([keras.layers.Dense(2)]).save(Path(folder) / "unbuilt.keras")
    assert sorted(path.name for path in Path(folder).iterdir()) == ["computes.keras", "unbuilt.keras"]
    return written.call_count // 2

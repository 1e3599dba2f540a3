"""A training that is stopped at epoch 3, and goes on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parity.models import CASES
from tests.parity.train import Spec, Weights, build, compiled, distributed, weights_from_numpy, weights_of
from tests.support.clearing import cleared

NAME, STOP, END = "mlp_ragged_adam", 3, 6
Told = tuple[list[float], Weights]


def _fit(model: Any, begin: int, end: int) -> list[float]:
    """The loss of each epoch."""
    case = CASES[NAME]
    options = {"batch_size": case.batch, "shuffle": False, "verbose": 0}
    history = model.fit(**case.data(), initial_epoch=begin, epochs=end, **options).history
    return [float(loss) for loss in history["loss"]]


def start(spec: Spec | None, folder: str | None, end: int) -> Told:
    """From the first epoch; saved at the end if there is a folder. (Each Keras backend draws other first weights.)"""
    import keras

    cleared()
    keras.utils.set_random_seed(7)
    case = CASES[NAME]
    with distributed(spec, case):
        model = compiled(case)
        build(model, case, case.data())
        model.set_weights(weights_from_numpy(model))
        losses = _fit(model, 0, end)
        if folder is not None:
            model.save(Path(folder) / "stopped.keras")
        return losses, weights_of(model, spec)


def go_on(spec: Spec | None, folder: str) -> Told:
    import keras

    cleared()
    keras.utils.set_random_seed(8)
    with distributed(spec, CASES[NAME]):
        model = keras.models.load_model(Path(folder) / "stopped.keras")
        return _fit(model, STOP, END), weights_of(model, spec)

"""Whatever the loop looks like, training is one device's: fewer rows than devices, several steps an execution, layers
that are frozen and thawed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.promises.conftest import Check
from tests.promises.places import everywhere

pytestmark = pytest.mark.processes


def few(kind: str | None, zero: int) -> dict[str, Any]:
    """Fewer rows than devices."""
    from tests.support import nets

    with nets.begun(kind, zero):
        return _fitted_on_few(nets.crossed(nets.regularized(), nets.adam()))


def few_pictures(kind: str | None, zero: int) -> dict[str, Any]:
    """The same where TensorFlow's kernels refuse no rows, or end the process: pooling's gradient by oneDNN."""
    import keras
    from keras import layers

    from tests.support import nets

    with nets.begun(kind, zero):
        model = keras.Sequential(
            [
                *(layers.Input((12,)), layers.Reshape((2, 6, 1)), layers.Conv2D(4, 1, activation="tanh")),
                *(layers.BatchNormalization(epsilon=0.3), layers.MaxPooling2D((1, 2)), layers.Flatten()),
                *(layers.Dense(8, name="a"), layers.Dense(nets.CLASSES, name="b")),
            ]
        )
        return _fitted_on_few(nets.crossed(model, nets.sgd()))


def _fitted_on_few(model: Any) -> dict[str, Any]:
    from tests.support import nets

    x, y = nets.rows(5)
    return {**nets.fitted(model, x, y, batch_size=2), "predict": model.predict(x, batch_size=3, verbose=0)}


def several(kind: str | None, zero: int) -> dict[str, Any]:
    """Three steps an execution, and what is left in the last; plain Keras on torch has one."""
    import keras

    from tests.support import nets

    executed: list[int] = []
    ends = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: executed.append(batch))
    x, y = nets.rows(14)
    at_once = 1 if kind is None and keras.config.backend() == "torch" else 3
    with nets.begun(kind, zero):
        model = nets.crossed(nets.regularized(), nets.adam(), steps_per_execution=at_once)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)
            found = nets.fitted(model, x, y, callbacks=[ends])
            found["predict"] = model.predict(x, batch_size=nets.BATCH, verbose=0)
    assert len(executed) == (4 if at_once == 1 else 2)
    return found


def toggled(kind: str | None, zero: int) -> dict[str, Any]:
    """A layer frozen between two fits, one from the beginning, and both thawed for a third."""
    from tests.support import nets

    x, y = nets.rows(12 if nets.FEW_PROGRAMS else nets.ROWS)
    with nets.begun(kind, zero):
        model = nets.plain()
        for name in ("b", "a"):
            model.get_layer(name).trainable = False
            nets.crossed(model, nets.sgd(momentum=0.9)).fit(x, y, batch_size=nets.BATCH, shuffle=False, verbose=0)
        model.get_layer("a").trainable = model.get_layer("b").trainable = True
        return nets.fitted_on_even(nets.crossed(model, nets.sgd(momentum=0.9)), evaluates=False)


def thawed(kind: str | None, zero: int) -> dict[str, Any]:
    """A frozen base of convolutions with a new head, and then all of it."""
    import keras
    from keras import layers

    from tests.support import nets

    x, y = nets.rows(12)
    with nets.begun(kind, zero):
        convolutions = [layers.Conv2D(8, 3, activation="tanh", name="c"), layers.BatchNormalization(epsilon=0.3)]
        base = keras.Sequential([keras.Input((3, 4, 1)), *convolutions, layers.Flatten()], name="base")
        base.trainable = False
        given = keras.Input((12,))
        out = layers.Dense(nets.CLASSES, name="head")(base(layers.Reshape((3, 4, 1))(given), training=False))
        model = nets.crossed(keras.Model(given, out), nets.adam())
        model.fit(x, y, batch_size=nets.BATCH, shuffle=False, verbose=0)
        model.evaluate(x, y, batch_size=nets.BATCH, verbose=0)
        base.trainable = True
        return nets.fitted_on_even(nets.crossed(model, nets.adam()))


PROGRAMS = {
    "torch": [few, toggled, several, thawed],
    "jax": [few, toggled, several],
    "tensorflow": [few, toggled, several],
    "horovod-2-tensorflow": [few_pictures],
}


def _fits(_: str, kind: str, zero: int, program: Any) -> bool:
    # A net of convolutions has nothing to be cut by a model axis.
    return program is not thawed or kind == "dp"


@pytest.mark.parametrize(("setting", "kind", "zero", "program"), everywhere(PROGRAMS, _fits))
def test_it_trains_as_one_device(setting: str, kind: str, zero: int, program: Any, as_alone: Check) -> None:
    as_alone(setting, kind, zero, program)

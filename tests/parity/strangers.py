"""Programs on TensorFlow that use what the model that trains does not have: variables, tensors, layers, epochs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Result = dict[str, Any]


def _data(rows: int = 24) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 1)).astype("float32")


def _layers() -> list[Any]:
    import keras

    return [keras.Input((6,)), keras.layers.Dense(8, "tanh", name="hidden"), keras.layers.Dense(1)]


def _scope(distributed: bool, again: bool = False) -> Any:
    """`again`: on another mesh, and Keras has what it had."""
    import keras

    import unidist

    if again:
        mesh = {"data": 2, "model": 2}
        return unidist.ModelParallel(unidist.Mesh(mesh)).scope() if distributed else contextlib.nullcontext()
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    return unidist.DataParallel(zero=3).scope() if distributed else contextlib.nullcontext()


def _told(model: Any, **more: Any) -> Result:
    return {**more, **{f"w{k}": np.asarray(w) for k, w in enumerate(model.get_weights())}}


def _model(distributed: bool) -> Any:
    import keras

    with _scope(distributed):
        model = keras.Sequential(_layers())
        model.compile("sgd", "mse")
    return model


def _trained(distributed: bool) -> tuple[Any, Any]:
    """A model behind an epoch, and its inputs."""
    model, (x, y) = _model(distributed), _data()
    model.fit(x, y, batch_size=8, verbose=0)
    return model, x


def _stepping(change: Callable[[Any, Any], Any], distributed: bool, again: bool = False) -> Result:
    """A model whose step changes its inputs first."""
    import keras
    import tensorflow as tf

    class Stepping(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step((change(self, data[0]), data[1]))

    with _scope(distributed, again):
        model = Stepping(_layers())
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.held = [tf.Variable(0.0, trainable=False)]
    x, y = _data()
    return _told(model, loss=model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"])


def unseeded(distributed: bool) -> Result:
    """Keras's own seed is made by the step that draws first, and goes on outside of it and on another mesh."""
    import keras
    import tensorflow as tf

    def change(_: Any, x: Any) -> Any:
        return x + 0.1 * keras.random.normal(tf.shape(x))

    found = _stepping(change, distributed)
    after = np.asarray(keras.random.uniform((3,)))
    again = _stepping(change, distributed, again=True)
    return {**found, "after": after, **{f"again {name}": value for name, value in again.items()}}


def counted_elsewhere(distributed: bool) -> Result:
    """A metric and a variable of Keras's that no model has."""
    import keras
    import tensorflow as tf

    mean, count = keras.metrics.Mean(), keras.Variable(0.0)

    def change(_: Any, x: Any) -> Any:
        mean.update_state(tf.reduce_mean(x, axis=1))
        count.assign_add(1.0)
        return x * tf.cast(count, "float32")

    found = _stepping(change, distributed)
    return {**found, "mean": float(mean.result()), "count": np.asarray(count)}


def held_elsewhere(distributed: bool) -> Result:
    """A tensor that a function holds, too large to be a constant by TensorFlow's own rule."""
    import tensorflow as tf

    wide = tf.random.stateless_normal((6, 60), seed=(1, 2))
    return _stepping(lambda _, x: x + 0.1 * tf.matmul(tf.matmul(x, wide), wide, transpose_b=True), distributed)


def made_of_its_layers(distributed: bool) -> Result:
    """Outputs of a layer, by a new model that is made behind the strategy."""
    import keras

    model, x = _trained(distributed)
    part = keras.Model(model.inputs, model.get_layer("hidden").output)
    return {"predicted": part.predict(x, verbose=0), "called": np.asarray(part(x))}


def epochs_are_counted(distributed: bool) -> Result:
    """The data say how many epochs have ended, as soon as threads of their own prepare it."""
    import keras

    x, y = _data()

    class Counting(keras.utils.PyDataset):
        epoch = 0

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            rows = slice(8 * index, 8 * index + 8)
            return x[rows], y[rows] + self.epoch

        def on_epoch_end(self) -> None:
            self.epoch += 1

    model = _model(distributed)
    data = Counting(workers=2, use_multiprocessing=False)
    return _told(model, loss=model.fit(data, epochs=3, shuffle=False, verbose=0).history["loss"])


def differentiated(distributed: bool) -> Result:
    """Jacobians of a model by TensorFlow's tape, which traces gradients if it may."""
    import tensorflow as tf

    import unidist

    model, x = _trained(distributed)
    given = tf.constant(x[:4])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(given)
        predicted = model(given)
    if distributed:
        with pytest.raises(unidist.CapabilityError, match="experimental_use_pfor=False"):
            tape.batch_jacobian(predicted, given)
    found = np.asarray(tape.gradient(predicted, given))
    return {"found": found, "by rows": np.asarray(tape.batch_jacobian(predicted, given, experimental_use_pfor=False))}


def cropped() -> tuple[str, str]:
    """What a slice between drawn numbers raises, of which DTensor takes nothing."""
    import keras

    import unidist

    with _scope(True):
        ends = [keras.layers.Conv2D(2, 3), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.RandomCrop(6, 6, seed=7), *ends])
        model.compile("sgd", "mse")
    try:
        model.fit(np.ones((8, 8, 8, 3)), np.ones((8, 1)), batch_size=8, verbose=0)
    except unidist.UnidistError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def by_inputs(distributed: bool) -> Result:
    """A step whose loss has derivatives of the model by its inputs."""
    import keras
    import tensorflow as tf

    import unidist

    class Physical(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, _ = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    found = self(x, training=True)
                slope = inner.gradient(found, x)
                loss = tf.reduce_mean(tf.square(tf.reduce_sum(slope, axis=1, keepdims=True) + found - 1.0))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    _scope(False)
    with unidist.DataParallel().scope() if distributed else contextlib.nullcontext():
        model = Physical(_layers())
        model.compile(keras.optimizers.SGD(0.1))
    x, y = _data()
    return _told(model, loss=model.fit(x, y, batch_size=7, epochs=2, verbose=0).history["loss"])


def written_by_a_layer(distributed: bool) -> Result:
    """What a layer writes is TensorFlow's own: numbers of all rows, and the state of a generator of noise."""
    import keras
    import tensorflow as tf

    import unidist

    class Counting(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.sums = tf.Variable(0.0, trainable=False), tf.Variable([0.0] * 8, trainable=False)
            self.noise = tf.random.Generator.from_seed(3)

        def call(self, x: Any) -> Any:
            self.calls.assign_add(1.0)
            self.sums.scatter_nd_add([[0]], tf.reduce_sum(x, axis=0)[:1])
            return x + 0.1 * self.noise.normal(tf.shape(x))

    _scope(False)
    counting, (first, hidden, last) = Counting(), _layers()
    with unidist.DataParallel().scope() if distributed else contextlib.nullcontext():
        model = keras.Sequential([first, hidden, counting, last])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = _data()
    loss = model.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0).history["loss"]
    kept = {name: np.asarray(getattr(counting, name)) for name in ("calls", "sums")}
    return _told(model, loss=loss, state=np.asarray(counting.noise.state), **kept)


def written_by_each(how: str) -> tuple[str, str]:
    """What a step that writes a variable of TensorFlow's raises, or draws from its generator."""
    import tensorflow as tf

    import unidist

    generator = tf.random.Generator.from_seed(3)

    def change(model: Any, x: Any) -> Any:
        if how == "drawn":
            return x + generator.normal(x.shape)
        add = {"added": model.held[0].assign_add, "scattered": model.held[0].scatter_nd_add}[how]
        add(*([1.0] if how == "added" else [[[]], [1.0]]))
        return x

    try:
        _stepping(change, True)
    except unidist.UnidistError as error:
        return type(error).__name__, str(error)
    return "nothing", ""

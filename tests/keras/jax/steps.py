"""Steps of a user's own, as Keras's guides to training with JAX write them."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import ops

from tests.support import nets
from tests.support.runs import Result, told


class Measured(keras.Sequential):
    """Computes loss and metrics statelessly: the loss from compute_loss, each metric from its own variables."""

    def losing(self, trainable: Any, other: Any, x: Any, y: Any) -> Any:
        y_pred, other = self.stateless_call(trainable, other, x, training=True)
        return self.compute_loss(x, y, y_pred), (y_pred, other)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, other, slots, states = state
        x, y = data
        gradients = jax.value_and_grad(self.losing, has_aux=True)
        (loss, (y_pred, other)), grads = gradients(trainable, other, x, y)
        trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        logs, states = self.told(states, loss, y, y_pred)
        return logs, (trainable, other, slots, states)

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, other, states = state
        x, y = data
        y_pred, other = self.stateless_call(trainable, other, x, training=False)
        logs, states = self.told(states, self.compute_loss(x, y, y_pred), y, y_pred)
        return logs, (trainable, other, states)

    def told(self, states: Any, loss: Any, y: Any, y_pred: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        new: list[Any] = []
        logs = {}
        for metric in self.metrics:
            mine = states[len(new) : len(new) + len(metric.variables)]
            mine = metric.stateless_update_state(mine, *((loss,) if metric.name == "loss" else (y, y_pred)))
            logs[metric.name] = metric.stateless_result(mine)
            new += mine
        return logs, tuple(new)


def run(kind: str | None, zero: int) -> Result:
    x, y = nets.rows()
    with nets.begun(kind, zero):
        model = Measured(nets.plain().layers, name="plain")
        nets.crossed(model, nets.adam(), metrics=["accuracy"])
    history = model.fit(x, y, batch_size=nets.BATCH, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
    return {"history": history, "evaluate": evaluated, **told(model)}


def one_place(kind: str | None) -> Result:
    """A table that is the same everywhere, one row of which is overwritten, and which is then cut by its rows."""
    table = np.random.default_rng(3).normal(size=(8, 4)).astype("float32")
    with nets.begun(kind, 0):
        distribution = keras.distribution.distribution()

        def filled(row: Any) -> Any:
            found = ops.scatter_update(table, [[3]], row[None])
            if distribution is None:
                return found
            layout = keras.distribution.TensorLayout((distribution.device_mesh.axis_names[0], None))
            layout.device_mesh = distribution.device_mesh
            return keras.distribution.distribute_tensor(found, layout)

        return {"table": np.asarray(jax.jit(filled)(np.ones(4, "float32")))}

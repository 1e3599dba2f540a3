"""A train_step of a model's own, as Keras's guides write it for torch and for JAX."""

from __future__ import annotations

from typing import Any

import keras


class OwnStep(keras.Model):
    """Subclasses say what a batch's loss is, by `objective(data, outputs)`; `call` gives the outputs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def objective(self, x: Any, outputs: Any) -> Any:
        raise NotImplementedError

    def train_step(self, *given: Any) -> Any:
        return self._on_torch(*given) if keras.backend.backend() == "torch" else self._on_jax(*given)

    def _on_torch(self, data: Any) -> dict[str, Any]:
        import torch

        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss = self.objective(x, self(x, training=True))
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def _on_jax(self, state: Any, data: Any) -> Any:
        import jax

        trainable, other, slots, counts = state
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)

        def losing(trainable: Any, other: Any) -> Any:
            outputs, other = self.stateless_call(trainable, other, x, training=True)
            return self.objective(x, outputs), other

        (loss, other), gradients = jax.value_and_grad(losing, has_aux=True)(trainable, other)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        counts = self.tracker.stateless_update_state(counts, loss)
        return {"loss": self.tracker.stateless_result(counts)}, (trainable, other, slots, counts)

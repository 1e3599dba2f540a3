"""Generative adversarial networks: two models, two optimizers, one step. What the maker begins with comes with the
data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

ROWS, BATCH, WIDTH, LATENT = 20, 8, 6, 4


class Adversaries(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="adversaries")
        self.judge = keras.Sequential(
            [layers.Input((WIDTH,)), layers.Dense(16, name="a"), layers.LeakyReLU(), layers.Dense(1, name="b")],
            name="judge",
        )
        self.maker = keras.Sequential(
            [layers.Input((LATENT,)), layers.Dense(16, "relu", name="c"), layers.Dense(WIDTH, name="d")], name="maker"
        )
        self.judges_loss = keras.metrics.Mean(name="judge")
        self.makers_loss = keras.metrics.Mean(name="maker")
        self.built = True

    def compile(self, judge: Any, maker: Any, loss: Any) -> None:
        super().compile()
        self.judge_optimizer, self.maker_optimizer, self.loss_fn = judge, maker, loss
        self.judge_optimizer.build(self.judge.trainable_variables)
        self.maker_optimizer.build(self.maker.trainable_variables)

    @property
    def metrics(self) -> list[Any]:
        return [self.judges_loss, self.makers_loss]

    def call(self, noise: Any) -> Any:
        return self.judge(self.maker(noise))

    def judged(self, judge: Any, real: Any, made: Any) -> Any:
        """Made rows are ones, real rows zeros; both in one batch."""
        logits = judge(ops.concatenate([made, real], axis=0))
        rows = ops.shape(real)[0]
        return self.loss_fn(ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0), logits)

    def fooled(self, logits: Any) -> Any:
        return self.loss_fn(ops.zeros((ops.shape(logits)[0], 1)), logits)

    def train_step(self, *given: Any) -> Any:
        return self._on_torch(*given) if keras.backend.backend() == "torch" else self._on_jax(*given)

    def _on_torch(self, data: Any) -> dict[str, Any]:
        import torch

        (real, noise), _, _ = keras.utils.unpack_x_y_sample_weight(data)
        made = self.maker(noise, training=True)
        self.zero_grad()
        judged = self.judged(lambda x: self.judge(x, training=True), real, made.detach())
        judged.backward()
        weights = self.judge.trainable_weights
        with torch.no_grad():
            self.judge_optimizer.apply([w.value.grad for w in weights], weights)
        self.zero_grad()
        fooled = self.fooled(self.judge(self.maker(noise, training=True), training=True))
        fooled.backward()
        weights = self.maker.trainable_weights
        with torch.no_grad():
            self.maker_optimizer.apply([w.value.grad for w in weights], weights)
        self.judges_loss.update_state(judged)
        self.makers_loss.update_state(fooled)
        return {m.name: m.result() for m in self.metrics}


class Pair:
    """The two models, trained on JAX by a step of one's own: Keras's trainer there knows one optimizer."""

    def __init__(self, model: Any, optimizers: tuple[Any, Any], loss: Any) -> None:
        self.model, self.loss = model, loss
        self.optimizers = optimizers
        model.loss_fn = loss
        for optimizer, part in zip(optimizers, (model.judge, model.maker), strict=True):
            optimizer.build(part.trainable_variables)

    def fit(self, real: Any, noise: Any, steps: int) -> dict[str, list[float]]:
        import jax

        model, (judging, making) = self.model, self.optimizers
        judge, maker = model.judge, model.maker

        @jax.jit
        def step(state: Any, real: Any, noise: Any) -> Any:
            judges, makers, judge_slots, maker_slots = state

            def judged(judges: Any) -> Any:
                made, _ = maker.stateless_call(makers, [], noise, training=True)
                return model.judged(lambda x: judge.stateless_call(judges, [], x, training=True)[0], real, made)

            def fooled(makers: Any) -> Any:
                made, _ = maker.stateless_call(makers, [], noise, training=True)
                return model.fooled(judge.stateless_call(judges, [], made, training=True)[0])

            one, gradients = jax.value_and_grad(judged)(judges)
            judges, judge_slots = judging.stateless_apply(judge_slots, gradients, judges)
            other, gradients = jax.value_and_grad(fooled)(makers)
            makers, maker_slots = making.stateless_apply(maker_slots, gradients, makers)
            return (one, other), (judges, makers, judge_slots, maker_slots)

        parts = [judge.trainable_variables, maker.trainable_variables, judging.variables, making.variables]
        state = tuple([v.value for v in part] for part in parts)
        told: dict[str, list[float]] = {"judge": [], "maker": []}
        for _ in range(steps):
            losses = []
            for start in range(0, ROWS, BATCH):
                one, state = step(state, real[start : start + BATCH], noise[start : start + BATCH])
                losses.append([float(x) for x in one])
            for name, values in zip(told, zip(*losses, strict=True), strict=True):
                told[name].append(float(np.average(values, weights=[1] * len(values))))
        for part, values in zip(parts, state, strict=True):
            for variable, value in zip(part, values, strict=True):
                variable.assign(value)
        return told


def run(steps: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    real = rng.normal(1.0, 0.5, size=(ROWS, WIDTH)).astype("float32")
    noise = rng.normal(size=(ROWS, LATENT)).astype("float32")
    model = Adversaries()
    optimizers = tuple(keras.optimizers.Adam(rate, epsilon=1e-3) for rate in (0.01, 0.02))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    if keras.backend.backend() == "torch":
        model.compile(*optimizers, loss)  # type: ignore[call-arg]
        told = model.fit((real, noise), batch_size=BATCH, epochs=steps, shuffle=False, verbose=0).history
    else:
        told = Pair(model, optimizers, loss).fit(real, noise, steps)
    return {**told, "made": model.maker.predict(noise[:5], verbose=0), "weights": model.get_weights()}

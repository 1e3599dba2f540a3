"""The optimizers of the promises, as Keras writes them and as users do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops, optimizers

from tests.support.nets import adam, sgd


def decayed(**options: Any) -> Any:
    return optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3, **options)


class OfAllGradients(optimizers.SGD):
    """Its `apply` looks at all gradients and at all weights."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = trainable_variables or self._trainable_variables
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
        size = sum(ops.sum(ops.abs(ops.convert_to_tensor(v))) for v in variables)
        return super().apply([g * size / (10.0 + 100.0 * norm) for g in grads], trainable_variables)


class OfWholeGradients(optimizers.Adam):
    """Behind Keras's clipping each gradient is kept small against its weights."""

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        sizes = [ops.norm(ops.convert_to_tensor(v)) + 1e-3 for v in trainable_variables]
        small = [g * ops.minimum(1.0, 0.1 * s / (ops.norm(g) + 1e-6)) for g, s in zip(grads, sizes, strict=True)]
        return super()._backend_apply_gradients(small, trainable_variables)


# Scales up at every second step, and down where gradients overflow: 2**126 times a loss does.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "clipnorm": lambda: sgd(clipnorm=0.1, momentum=0.9),
    "global clipnorm": lambda: adam(global_clipnorm=0.1),
    "clipvalue": lambda: sgd(clipvalue=0.01, momentum=0.9),
    "ema": lambda: sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulation": lambda: adam(gradient_accumulation_steps=2),
    "ema at the end": lambda: sgd(use_ema=True, ema_momentum=0.5),
    "schedule": lambda: sgd(learning_rate=optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9),
    "decay": decayed,
    "scaled": lambda: optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**8, dynamic_growth_steps=2),
    "overflow": lambda: optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**127),
    "scaled accumulation": lambda: optimizers.LossScaleOptimizer(adam(gradient_accumulation_steps=2), 2.0**8),
    # Several at once, where each program takes seconds to compile.
    "clipnorm, schedule, ema": lambda: sgd(
        learning_rate=optimizers.schedules.ExponentialDecay(0.1, 2, 0.5),
        momentum=0.9,
        clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    ),
    "clipvalue, ema at the end": lambda: sgd(clipvalue=0.01, momentum=0.9, use_ema=True, ema_momentum=0.5),
    "global clipnorm, decay": lambda: decayed(global_clipnorm=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, epsilon=1e-3),
    "lion": lambda: optimizers.Lion(0.001),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "nadam": lambda: optimizers.Nadam(0.01, epsilon=1e-3),
    # Of whole variables:
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "schedule free": lambda: optimizers.ScheduleFreeAdamW(0.01, epsilon=1e-3),
    "lamb": lambda: optimizers.Lamb(0.01, epsilon=1e-3),
    "muon": lambda: optimizers.Muon(0.01, epsilon=1e-3),
    "several": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            adam(global_clipnorm=0.1),
            {".*a/kernel": optimizers.Muon(0.01, epsilon=1e-3), ".*b/.*": sgd(momentum=0.9)},
        )
    ),
    # Of all gradients:
    "own apply": lambda: OfAllGradients(0.1, momentum=0.9),
    "own gradients": lambda: OfWholeGradients(0.01, epsilon=1e-3),
    "own apply, accumulation": lambda: OfAllGradients(0.1, gradient_accumulation_steps=2),
}

"""Functions with a gradient of their own, which tf.GradientTape records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from unidist import events


def differentiable(
    x: Any, forward: Callable[[Any], Any], backward: Callable[[Any], Any], check: Callable[[], object]
) -> Any:
    """Returns forward(x), whose gradient is backward(gradient), and so on in turns.

    `check` raises where it has none.

    The gradient's collectives are for what the forward ones were for.
    """
    purpose = events.purpose()

    def grad(upstream: Any) -> Any:
        check()
        with events.for_purpose(purpose):
            return _linear(backward, forward)(upstream)

    return tf.custom_gradient(lambda value: (forward(value), grad))(x)


def _linear(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def both(value: Any) -> tuple[Any, Callable[[Any], Any]]:
        return forward(value), _linear(backward, forward)

    found: Callable[[Any], Any] = tf.custom_gradient(both)
    return found

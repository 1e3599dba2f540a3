"""Random state of a process: what Keras, NumPy, Python, and TensorFlow or torch under Keras draw next."""

from __future__ import annotations

import pickle
import random
from typing import Any

import keras
import numpy as np

from unidist.keras.compat import GLOBAL_RANDOM_SEED, GLOBAL_SEED_GENERATOR, global_seed_generator, global_state


def state() -> bytes:
    """The state, for another process's `restore`. Draws nothing, so that a seeded process goes on as it would alone.

    Python's `random` gives Keras its implicit seeds, NumPy's global state shuffles, Keras's own global seed generator
    serves random ops without a seed, TensorFlow draws seeds for its stateful ops, which shuffle for Keras, and torch
    shuffles in its DataLoader.
    """
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "seed": global_state.get_global_attribute(GLOBAL_RANDOM_SEED),
        "generator": None if generator is None else np.asarray(generator.state.numpy()),
    }
    if keras.config.backend() == "tensorflow":
        found["tensorflow"] = _state_of_tensorflow()
    if keras.config.backend() == "torch":
        found["torch"] = _torch().get_rng_state().numpy()
    return pickle.dumps(found)


def restore(data: bytes) -> None:
    """Goes on from a state."""
    found = pickle.loads(data)
    if found["seed"] is not None:
        global_state.set_global_attribute(GLOBAL_RANDOM_SEED, found["seed"])
    if found["generator"] is None:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    else:
        global_seed_generator().state.assign(found["generator"])
    if "tensorflow" in found:
        _restore_tensorflow(*found["tensorflow"])
    if "torch" in found:
        _torch().set_rng_state(_torch().from_numpy(found["torch"]))
    # Last, since making a seed generator draws from Python's state.
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])


def _torch() -> Any:
    import torch

    return torch


def _state_of_tensorflow() -> tuple[int, Any]:
    import tensorflow as tf
    from tensorflow.python.eager import context

    if context.global_seed() is None:
        tf.random.set_seed(random.SystemRandom().getrandbits(31))
    return context.global_seed(), context.context()._rng.getstate()


def _restore_tensorflow(seed: int, drawn: Any) -> None:
    import tensorflow as tf
    from tensorflow.python.eager import context

    if seed != context.global_seed():
        tf.random.set_seed(seed)
    # TensorFlow draws the seeds of its operations from a generator of its context.
    context.context()._rng.setstate(drawn)

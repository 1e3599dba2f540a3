"""Random state of a process: what Keras, NumPy, Python, and TensorFlow or torch under Keras draw next."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from unidist.keras.patching.compat import GLOBAL_RANDOM_SEED, GLOBAL_SEED_GENERATOR, global_seed_generator, global_state

ARRAY = "array"


def state() -> bytes:
    """Returns the state, for another process's `restore`.

    Draws nothing, so that a seeded process goes on as it would alone.

    Python's `random` gives Keras its implicit seeds, NumPy's global state shuffles, Keras's own global seed generator
    serves random ops without a seed, TensorFlow draws seeds for its stateful ops, which shuffle for Keras, and torch
    shuffles in its DataLoader. As JSON: what comes from another process is data, never code.
    """
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "seed": global_state.get_global_attribute(GLOBAL_RANDOM_SEED),
        "generator": None if generator is None else np.asarray(generator.state.numpy()),
    }
    # Whichever runs Keras: datasets of the others are read too.
    if "tensorflow" in sys.modules:
        found["tensorflow"] = _state_of_tensorflow()
    if "torch" in sys.modules:
        found["torch"] = _torch().get_rng_state().numpy()
    return json.dumps(found, default=lambda one: packed(one) if isinstance(one, np.ndarray) else one.item()).encode()


def restore(data: bytes) -> None:
    """Goes on from a state. Raises ValueError: the bytes are none."""
    found = json.loads(data, object_hook=unpacked)
    if found["seed"] is not None:
        global_state.set_global_attribute(GLOBAL_RANDOM_SEED, found["seed"])
    if found["generator"] is None:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    else:
        global_seed_generator().state.assign(found["generator"])
    if "tensorflow" in found and "tensorflow" in sys.modules:
        _restore_tensorflow(*found["tensorflow"])
    if "torch" in found and "torch" in sys.modules:
        _torch().set_rng_state(_torch().from_numpy(found["torch"]))
    # Last, since making a seed generator draws from Python's state.
    random.setstate(as_tuples(found["python"]))
    np.random.set_state(found["numpy"])


def leave() -> None:
    """Keras's own generator goes on where it stands, in a variable that no strategy has placed."""
    if global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not None:
        before = state()
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
        restore(before)


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Lets what is drawn inside be drawn again behind it.

    It serves runs of a model that the program did not ask for.
    """
    before = state()
    try:
        yield
    finally:
        restore(before)


def packed(array: Any) -> dict[str, Any]:
    """An array of NumPy as JSON."""
    return {ARRAY: [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}


def unpacked(found: dict[str, Any]) -> Any:
    """Returns the array that was packed; whatever else it is, as it is."""
    if ARRAY not in found:
        return found
    dtype, shape, data = found[ARRAY]
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


def as_tuples(state: list[Any]) -> tuple[Any, ...]:
    """Returns what Python's `random` takes: JSON knows no tuples."""
    version, numbers, drawn = state
    return version, tuple(numbers), drawn


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
    context.context()._rng.setstate(as_tuples(drawn))

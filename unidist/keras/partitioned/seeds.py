"""Random state: what Keras, NumPy and Python draw next is the same on every process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

from unidist.keras.partitioned import processes


def align() -> None:
    """Gives every process the random state of process 0. A collective of the world.

    Python's `random` gives Keras its implicit seeds, NumPy's global state shuffles, and Keras's own global seed
    generator serves random ops without a seed.
    """
    if not processes.several():
        return
    found = processes.from_first(_state())
    if found["seed"] is not None:
        global_state.set_global_attribute(GLOBAL_RANDOM_SEED, found["seed"])
    if found["generator"] is None:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    else:
        global_seed_generator().state.assign(found["generator"])
    # Last, since making a seed generator draws from Python's state.
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])


def _state() -> dict[str, Any]:
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "seed": global_state.get_global_attribute(GLOBAL_RANDOM_SEED),
        "generator": None if generator is None else generator.state.numpy(),
    }

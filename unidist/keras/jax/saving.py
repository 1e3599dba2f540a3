"""A model's whole values for the process that saves it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from unidist.keras import active_distribution
from unidist.keras.consistency.processes import Processes
from unidist.keras.jax import placing, processes
from unidist.keras.saving import agree_on_room


def loading(model: Any) -> Processes | None:
    """Returns the processes of the world, if several hold the model, or would once it is made."""
    found = placing.current() if model is None else placing.distribution_of(model)
    return None if found is None else processes.processes()


@contextlib.contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Makes the model's variables, on process 0, whole values in its memory, with which it computes alone.

    A layer with low-rank kernels saves what they make together.
    """
    processes.meet("saving")
    agree_on_room(model, processes.processes())
    held = []
    for variable in active_distribution.all_variables(model):
        value = variable._value
        if value is None or value.is_fully_addressable:
            continue
        host = processes.whole(value)
        if processes.is_first():
            held.append((variable, value, jax.device_put(host, jax.local_devices(backend="cpu")[0])))
    for variable, _, whole in held:
        variable._value = whole
    try:
        yield
    finally:
        for variable, value, _ in held:
            variable._value = value

"""Finds the devices that a strategy's mesh means: the tensorflow backend's, or the simulator's."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
from tensorflow.experimental import dtensor

from unidist import events, session
from unidist.algebra import Layout, Mesh, Sharding
from unidist.backends import registry
from unidist.backends.protocol import Array
from unidist.backends.tensorflow import joining
from unidist.backends.tensorflow.backend import TensorflowBackend
from unidist.backends.tensorflow.devices import hide_gpus, task_of
from unidist.errors import CapabilityError
from unidist.keras.consistency.agreement import Peers
from unidist.keras.consistency.processes import Processes


@lru_cache(maxsize=4)
def _simulated(count: int) -> TensorflowBackend:
    hide_gpus()
    return TensorflowBackend(devices=count)


def backend() -> TensorflowBackend:
    """The backend in use; for the simulator one with as many virtual CPU devices as it has ranks."""
    found = session.backend()
    return found if isinstance(found, TensorflowBackend) else _simulated(len(found.list_devices()))


def several() -> bool:
    return backend().process_count() > 1


def telling(what: str) -> AbstractContextManager[None]:
    """Raises ProcessLostError where another process of the world has ended in what is done here."""
    if not registry.has_current():
        # A model on one device: choosing a backend now would ask a running TensorFlow for more devices.
        return contextlib.nullcontext()
    return joining.told(backend().world, what)


def together(what: str) -> AbstractContextManager[None]:
    """As `telling`, for what all processes take part in: it begins when all have come to it.

    Raises:
        DesyncError: they have come to different things.
    """
    return backend().together(what) if registry.has_current() else contextlib.nullcontext()


def in_order(mesh: Mesh) -> Mesh:
    """The mesh with its devices in the order of ranks.

    On a mesh in another order DTensor's all_to_all misorders what it moves, and any step may contain one. Which of the
    mesh's devices holds which part makes no difference to the numbers.
    """
    return Mesh(dict(mesh.axes), sorted(mesh.devices))


def native_mesh(mesh: Mesh) -> dtensor.Mesh:
    return backend().mesh(in_order(mesh))


def native_layout(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> dtensor.Layout:
    """DTensor's layout of a variable or batch.

    Raises:
        CapabilityError: several axes on one dim, which DTensor cannot say.
    """
    for dim in range(len(shape)):
        if len(axes := layout.dim_axes(dim)) > 1:
            raise CapabilityError(
                f"DTensor shards a dim over one axis, but {layout} shards dim {dim} of shape {shape} over {axes}: use "
                "a mesh in which these axes are one"
            )
    return backend().layout(Sharding(in_order(mesh), layout, shape))


# Items of an array that go in one broadcast, which holds several copies of them.
PIECE = 1 << 20


def from_first(value: Any) -> Array:
    """Returns process 0's array on every process; all give one of the same shape and dtype.

    A collective of the world.
    """
    given = np.asarray(value)
    if given.size <= PIECE:
        return _piece_from_first(given)
    found = given.copy()
    flat = found.reshape(-1)
    for start in range(0, len(flat), PIECE):
        flat[start : start + PIECE] = _piece_from_first(flat[start : start + PIECE])
    return found


def _piece_from_first(given: Array) -> Array:
    here = backend()
    mesh = Mesh({"rank": len(here.list_devices())})
    sharding = Sharding(mesh, Layout(), given.shape)
    held = here.from_local([given] * len(here.local_ranks()), sharding)
    return here.gather(here.broadcast(held, sharding, ("rank",), 0), sharding)


def process_of(rank: int) -> int:
    return task_of(backend().devices[rank])


def ranks_of(process: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(len(backend().devices)) if process_of(rank) == process)


def arrays_of_all(own: Array) -> list[Array]:
    """Returns every process's array, by process; all give one of the same shape and dtype.

    A collective of the world.
    """
    here = backend()
    count = len(here.devices)
    sharding = Sharding(Mesh({"rank": count}), Layout("rank"), (count, *own.shape))
    held = here.from_local([own[None]] * len(here.local_ranks()), sharding)
    found = here.gather(held, sharding)
    return [found[ranks_of(process)[0]] for process in range(here.process_count())]


def of_all(number: int, purpose: str) -> tuple[int, ...]:
    """Every process's number, by process. A collective of the world."""
    with events.for_purpose(purpose):
        return tuple(int(found) for found in arrays_of_all(np.array(number, np.int32)))


def processes() -> Processes | None:
    """Returns the processes of the world, if there are several."""
    here = backend()
    return _all(here, here.process_index(), here.process_count()) if several() else None


@lru_cache(maxsize=4)
def _all(here: TensorflowBackend, place: int, count: int) -> Processes:
    def of_first(array: Array, purpose: str) -> Array:
        with events.for_purpose(purpose):
            return from_first(array)

    return Processes(place, tuple(map(ranks_of, range(count))), of_first, of_all)


def peers() -> Peers | None:
    """Returns the processes of the world, if there are several.

    DTensor sends values where a variable is placed: what they have alike afterwards is not compared.
    """
    found = processes()
    return None if found is None else Peers(found, lambda variable: None)

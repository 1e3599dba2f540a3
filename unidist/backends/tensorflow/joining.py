"""Joins a world: DTensor's clients, which must know each other's addresses before any of them starts."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context

from unidist.backends.joining import lost, placed
from unidist.backends.lines import is_loopback
from unidist.backends.meeting import meet
from unidist.backends.protocol import Cluster
from unidist.backends.tensorflow.devices import take_gpus
from unidist.backends.tensorflow.gate import Gate
from unidist.errors import BackendMismatchError, BackendNotAvailableError, ProcessLostError

_JOBS, _CLIENT, _COUNT, _NAME = "DTENSOR_JOBS", "DTENSOR_CLIENT_ID", "DTENSOR_NUM_CLIENTS", "DTENSOR_JOB_NAME"
_IP = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class Membership:
    """The processes that this one belongs to.

    Attributes:
        gate: where they wait for each other before collectives; None in a world of one.
    """

    count: int
    index: int
    gate: Gate | None = None


def join(cluster: Cluster, devices: int = 1) -> Membership:
    """The world that the cluster or the launcher describes; else a world of one.

    Args:
        cluster: the world.
        devices: how many GPUs each process takes, where several are on a host.

    Raises:
        BackendMismatchError: TensorFlow has started in this process already.
        BackendNotAvailableError: the world could not be joined.
    """
    place = placed(cluster, "`unidist run -n {count} --backend tensorflow script.py`")
    count, index, launch = place.count, place.index, place.launch
    if count == 1:
        return Membership(1, 0)
    if context.context()._initialized:
        raise BackendMismatchError(
            "TensorFlow has started in this process already, alone: call unidist.initialize (or unidist.use under a "
            "launcher) before any TensorFlow operation"
        )
    jobs, lines = meet(place.address, count, index, cluster.timeout)
    os.environ.update({_JOBS: ",".join(jobs), _CLIENT: str(index), _COUNT: str(count), _NAME: "worker"})
    take_gpus(launch.local_index if launch else index, launch.local_count if launch else None, devices)
    kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    is_one_node = all(is_loopback(job.rpartition(":")[0]) for job in jobs)
    with _kept_to_the_loopback() if is_one_node else contextlib.nullcontext():
        dtensor.initialize_accelerator_system(kind)
    return Membership(count, index, Gate(index, count, lines, cluster.timeout))


# Seconds between two looks for sockets that have begun to listen.
_LOOK = 0.001


@contextlib.contextmanager
def _kept_to_the_loopback() -> Iterator[None]:
    """Binds sockets that begin to listen inside to the loopback's interface, on Linux.

    TensorFlow's servers listen at every address, and take no other: "0.0.0.0" is written in their source. So a thread
    looks for them while they start, and not only when all processes have met.

    Raises:
        BackendNotAvailableError: the system does not let them be bound.
    """
    started = threading.Event()

    def watch() -> None:
        while not started.wait(_LOOK):
            with contextlib.suppress(OSError):
                _keep_to_the_loopback()

    watching = threading.Thread(target=watch, name="unidist-loopback", daemon=True)
    watching.start()
    try:
        yield
    finally:
        started.set()
        watching.join()
    try:
        _keep_to_the_loopback()
    except OSError as error:
        raise BackendNotAvailableError(
            f"TensorFlow listens at every address of this machine, and its sockets could not be bound to the loopback "
            f"({error}): use torch or jax, or a system that allows SO_BINDTODEVICE"
        ) from error


def _keep_to_the_loopback() -> None:
    folder = Path("/proc/self/fd")
    for name in os.listdir(folder) if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(folder / name).startswith("socket:"):
                _bind_to_the_loopback(int(name))


def _bind_to_the_loopback(number: int) -> None:
    try:
        found = socket.socket(fileno=os.dup(number))
    except OSError:  # it was closed meanwhile
        return
    with found:
        listens = found.family in _IP and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and not is_loopback(found.getsockname()[0]) and not _interface(found):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def _interface(found: socket.socket) -> bytes:
    return found.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(bytes(1))


# A step that the lost process takes part in fails with the first error's status, which is not always "unavailable".
_WORDS = re.compile(
    r"connection (reset|refused|closed|aborted)|failed to connect|socket closed|broken pipe|heartbeat", re.IGNORECASE
)


@contextlib.contextmanager
def told(world: Membership, what: str) -> Iterator[None]:
    """Runs what takes part in collectives.

    Args:
        what: what this process does, for the message.

    Raises:
        ProcessLostError: another process of the world has ended.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if (found := loss(error, world, what)) is not None:
            raise found from error
        raise


def loss(error: Exception, world: Membership, what: str) -> ProcessLostError | None:
    """Returns the loss of another process that an error stands for, or None."""
    if world.count == 1 or not isinstance(error, tf.errors.OpError):
        return None
    found = _WORDS.search(error.message)
    if found is None and not isinstance(error, tf.errors.UnavailableError):
        return None
    why = found.group() if found else error.message.strip().splitlines()[0][:200]
    return lost(f"{what} on process {world.index} of {world.count}", why)

"""Joins a world: DTensor's clients, which must know each other's addresses before any of them starts."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context

from unidist.backends import door
from unidist.backends.environment import detect
from unidist.backends.lines import Line, family_of, is_loopback
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
    launch = detect()
    count = cluster.process_count or (launch.process_count if launch else 1)
    if count == 1:
        return Membership(1, 0)
    index = launch.process_index if launch and cluster.process_index is None else cluster.process_index
    address = cluster.address or (launch.address if launch else None)
    if index is None or address is None:
        raise BackendNotAvailableError(
            f"a world of {count} processes needs an address and each process's index: found address {address!r}, index "
            f"{index}. Give unidist.initialize(address, process_count, process_index), or start with "
            f"`unidist run -n {count} --backend tensorflow script.py`"
        )
    if context.context()._initialized:
        raise BackendMismatchError(
            "TensorFlow has started in this process already, alone: call unidist.initialize (or unidist.use under a "
            "launcher) before any TensorFlow operation"
        )
    jobs, lines = _meet(address, count, index, cluster.timeout)
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


def _meet(address: str, count: int, index: int, timeout: float) -> tuple[list[str], dict[int, Line]]:
    """Returns every process's own "host:port", by index, and the connections.

    Process 0 listens at the address, and sends all what each sent it.
    """
    host, _, port = address.rpartition(":")
    host, deadline = host.strip("[]"), time.monotonic() + timeout
    own, place = _free_port(), (host, int(port))
    try:
        if index == 0:
            return _collect(place, count, f"{host}:{own}", deadline)
        jobs, line = _tell(place, index, own, deadline)
        return jobs, {0: line}
    except (OSError, ValueError) as error:
        raise BackendNotAvailableError(
            f"process {index} of {count} did not meet the others at {address} within {timeout:g} s ({error}): are all "
            "started, with the same address?"
        ) from error


def _collect(place: tuple[str, int], count: int, own: str, deadline: float) -> tuple[list[str], dict[int, Line]]:
    jobs: dict[int, str] = {0: own}
    lines: dict[int, Line] = {}
    with (
        socket.create_server(place, family=family_of(place)) as server,
        contextlib.closing(door.guests(server, deadline)) as guests,
    ):
        for line, told, address in guests:
            index, port = told.get("index"), told.get("port")
            if type(index) is not int or not 0 < index < count or index in jobs or type(port) is not int:
                line.close()
                continue
            lines[index] = line
            jobs[index] = f"{_bracketed(address)}:{port}"
            if len(jobs) == count:
                break
    if len(jobs) < count:
        for line in lines.values():
            line.close()
        raise TimeoutError(f"processes {[k for k in range(count) if k not in jobs]} did not come")
    ordered = [jobs[k] for k in range(count)]
    for line in lines.values():
        line.say(jobs=ordered)
    return ordered, lines


def _tell(place: tuple[str, int], index: int, own: int, deadline: float) -> tuple[list[str], Line]:
    while True:
        left = max(0.01, deadline - time.monotonic())
        try:
            line = Line(socket.create_connection(place, timeout=left))
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        door.knock(line, index=index, port=own)
        return [str(job) for job in _heard(line, deadline)["jobs"]], line


def _heard(line: Line, deadline: float) -> dict[str, Any]:
    found = line.hear(max(0.01, deadline - time.monotonic()))
    if found is None:
        line.close()
        raise ConnectionError("a process ended or did not answer")
    return found


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


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
        if (lost := loss(error, world, what)) is not None:
            raise lost from error
        raise


def loss(error: Exception, world: Membership, what: str) -> ProcessLostError | None:
    """Returns the loss of another process that an error stands for, or None."""
    if world.count == 1 or not isinstance(error, tf.errors.OpError):
        return None
    found = _WORDS.search(error.message)
    if found is None and not isinstance(error, tf.errors.UnavailableError):
        return None
    why = found.group() if found else error.message.strip().splitlines()[0][:200]
    return ProcessLostError(
        f"{what} on process {world.index} of {world.count}: another process of the group ended ({why}). Look at the "
        "output of the other processes for the first error; then start all processes again"
    )

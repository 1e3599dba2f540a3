"""Joining a world: DTensor's clients, which all must know each other's addresses before any of them starts."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context

from unidist.backends.environment import detect
from unidist.backends.protocol import Cluster
from unidist.errors import BackendMismatchError, BackendNotAvailableError

_JOBS, _CLIENT, _COUNT, _NAME = "DTENSOR_JOBS", "DTENSOR_CLIENT_ID", "DTENSOR_NUM_CLIENTS", "DTENSOR_JOB_NAME"


@dataclass(frozen=True, slots=True)
class World:
    """The processes that this one belongs to."""

    count: int
    index: int


def join(cluster: Cluster) -> World:
    """The world that the cluster or the launcher describes; else a world of one.

    Raises:
        BackendMismatchError: TensorFlow has started in this process already.
        BackendNotAvailableError: the world could not be joined.
    """
    launch = detect()
    count = cluster.process_count or (launch.process_count if launch else 1)
    if count == 1:
        return World(1, 0)
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
    jobs = _meet(address, count, index, cluster.timeout)
    os.environ.update({_JOBS: ",".join(jobs), _CLIENT: str(index), _COUNT: str(count), _NAME: "worker"})
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    dtensor.initialize_accelerator_system(kind)
    return World(count, index)


def _meet(address: str, count: int, index: int, timeout: float) -> list[str]:
    """Every process's own "host:port", by index. Process 0 listens at the address, and tells all what each told it."""
    host, _, port = address.rpartition(":")
    host, deadline = host.strip("[]"), time.monotonic() + timeout
    own, place = _free_port(), (host, int(port))
    try:
        if index == 0:
            return _collect(place, count, f"{host}:{own}", deadline)
        return _tell(place, index, own, deadline)
    except (OSError, ValueError) as error:
        raise BackendNotAvailableError(
            f"process {index} of {count} did not meet the others at {address} within {timeout:g} s ({error}): are all "
            "started, with the same address?"
        ) from error


def _collect(place: tuple[str, int], count: int, own: str, deadline: float) -> list[str]:
    jobs = {0: own}
    with socket.create_server(place, family=_family(place)) as server:
        waiting = []
        try:
            while len(jobs) < count:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                connection, peer = server.accept()
                waiting.append(connection)
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                told = json.loads(connection.makefile("rb").readline())
                jobs[int(told["index"])] = f"{_bracketed(peer[0])}:{int(told['port'])}"
            ordered = [jobs[k] for k in range(count)]
            for connection in waiting:
                connection.sendall(json.dumps(ordered).encode() + b"\n")
        finally:
            for connection in waiting:
                connection.close()
    return ordered


def _tell(place: tuple[str, int], index: int, own: int, deadline: float) -> list[str]:
    while True:
        left = max(0.01, deadline - time.monotonic())
        try:
            with socket.create_connection(place, timeout=left) as connection:
                connection.sendall(json.dumps({"index": index, "port": own}).encode() + b"\n")
                return [str(job) for job in json.loads(connection.makefile("rb").readline())]
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _family(place: tuple[str, int]) -> socket.AddressFamily:
    return socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][0]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

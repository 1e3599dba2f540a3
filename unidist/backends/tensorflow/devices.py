"""TensorFlow's devices: virtual ones on CPU, names as Keras gives them, DTensor's meshes of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from unidist.algebra import Axes, Mesh
from unidist.backends import environment
from unidist.backends.validation import check_ranks
from unidist.errors import BackendMismatchError, BackendNotAvailableError, MeshError

# Set by `unidist run --devices-per-process`: as many virtual CPU devices, where the program names no number.
DEVICES = "UNIDIST_CPU_DEVICES"


def make(devices: int | Sequence[str] | None) -> int | Sequence[str] | None:
    """Makes virtual CPU devices where a program asks for them, or else the launcher.

    Returns:
        What is asked for, as a number or as names; None: by default all that TensorFlow has.
    """
    told = os.environ.get(DEVICES) if devices is None else None
    if told or are_cpus(devices):
        hide_gpus()
    if told:
        devices = int(told)
    if isinstance(devices, int):
        make_virtual(devices)
    elif devices is not None:
        make_named(devices)
    return devices


def make_virtual(count: int) -> None:
    """Gives this process `count` virtual CPU devices. TensorFlow must not have started otherwise.

    Raises:
        MeshError: fewer than one.
        BackendMismatchError: TensorFlow has started with another number.
    """
    if count < 1:
        raise MeshError(f"tensorflow needs at least one device, found devices={count}: use('tensorflow', devices=4)")
    physical = tf.config.list_physical_devices("CPU")[0]
    known = tf.config.get_logical_device_configuration(physical)
    if known is not None and len(known) == count:
        return
    try:
        tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:  # TensorFlow has started
        found = len(tf.config.list_logical_devices("CPU"))
        if found != count:
            raise BackendMismatchError(
                f"{count} virtual devices were asked for, but TensorFlow has started with {found} and cannot change "
                f'that: call unidist.use("tensorflow", devices={count}) before any TensorFlow operation'
            ) from error


def make_named(names: Sequence[str]) -> None:
    """Gives this process virtual CPU devices where CPUs are named from the first on.

    Does nothing where somebody has said how many there are.
    """
    unsaid = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0]) is None
    launch = environment.detect()
    is_alone = launch is None or launch.process_count == 1
    if is_alone and unsaid and len(names) > 1 and list(names) == [f"cpu:{k}" for k in range(len(names))]:
        with contextlib.suppress(BackendMismatchError):  # what is missing then is reported by its name
            make_virtual(len(names))


def are_cpus(devices: int | Sequence[str] | None) -> bool:
    """Returns whether CPUs are named."""
    return isinstance(devices, list | tuple) and all(name.lower().startswith("cpu:") for name in devices)


def hide_gpus(why: str = "CPUs were asked for") -> None:
    """Keeps TensorFlow from GPUs, which it would take whole in every process, where CPUs are asked for.

    Args:
        why: for the error.

    Raises:
        BackendMismatchError: TensorFlow has started with them.
    """
    if not tf.config.get_visible_devices("GPU"):
        return
    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError as error:
        raise BackendMismatchError(
            f"{why}, but TensorFlow has started with its GPUs and cannot let them go: call unidist.use "
            'before any TensorFlow operation, or set CUDA_VISIBLE_DEVICES=""'
        ) from error


def take_gpus(local_index: int, local_count: int | None, count: int = 1) -> None:
    """Leaves this process those GPUs of its host that are its own, and takes of their memory what is used.

    Args:
        local_index: the process's number on its host.
        local_count: how many there are; None: unknown, as if there were several.
        count: how many GPUs each takes.

    Raises:
        BackendNotAvailableError: there are not enough.
    """
    seen = tf.config.get_visible_devices("GPU")
    if not seen:
        return
    own = seen if local_count == 1 or len(seen) == 1 else seen[local_index * count : (local_index + 1) * count]
    if len(own) < count:
        raise BackendNotAvailableError(
            f"process {local_index} of this host needs {count} of its GPUs, but {len(seen)} are visible: start fewer "
            "processes a host, or name CPUs, as use('tensorflow', devices=['cpu:0'])"
        )
    tf.config.set_visible_devices(own, "GPU")
    for gpu in own:
        tf.config.experimental.set_memory_growth(gpu, True)


def find(devices: int | Sequence[str] | None) -> tuple[str, ...]:
    """TensorFlow's full names of the world's devices in rank order. Starts TensorFlow.

    Args:
        devices: None: the GPUs, else the CPUs; a number: these too, if each process has so many (on CPUs it has); names
            as "cpu:0": these, in this order.

    Raises:
        BackendNotAvailableError: TensorFlow has no such device.
        MeshError: a device is named twice, or none is named; or there are GPUs, and not as many.
    """
    if devices is None or isinstance(devices, int):
        found = len(tf.config.get_visible_devices("GPU"))
        if found and isinstance(devices, int) and found != devices:
            raise MeshError(
                f"use('tensorflow', devices={devices}): this process has {found} GPUs, which a number means. Give "
                f"devices={found}, or name CPUs, which are virtual: devices=['cpu:0', ..., 'cpu:{devices - 1}']"
            )
        return tuple(_full_names("GPU" if found else "CPU"))
    names = list(devices)
    if not names or len(set(names)) != len(names):
        raise MeshError(f"tensorflow: devices={names} must name at least one device, and each once")
    known: dict[str, str] = {}
    for name in _full_names(None):
        kind = kind_of(name)
        known[f"{kind}:{sum(key.startswith(kind + ':') for key in known)}"] = name
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BackendNotAvailableError(f"tensorflow has no device {unknown[0]!r}: it has {list(known)}")
    return tuple(known[name] for name in names)


def kind_of(name: str) -> str:
    """ "cpu" of "/job:localhost/replica:0/task:0/device:CPU:1"."""
    return name.rsplit(":", 2)[-2].lower()


def task_of(name: str) -> int:
    return int(name.partition("/task:")[2].partition("/")[0])


def _full_names(kind: str | None) -> list[str]:
    """In the order of processes; TensorFlow leaves the job out of names where there is one process."""
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    return sorted((n if n.startswith("/job:") else "/job:localhost/replica:0/task:0" + n for n in names), key=_place)


def _place(name: str) -> tuple[str, int, int]:
    return kind_of(name), task_of(name), int(name.rpartition(":")[2])


class Meshes:
    """The meshes of one world, as one of its processes makes them.

    Args:
        devices: TensorFlow's full names; the k-th is rank k.
        index: of this process.
        count: how many processes the world has.
    """

    def __init__(self, devices: tuple[str, ...], index: int, count: int) -> None:
        self._devices = devices
        self._index, self._count = index, count
        self._meshes: dict[Mesh, dtensor.Mesh] = {}
        self._of_groups: dict[tuple[Mesh, Axes], tuple[dtensor.Mesh, tuple[int, ...]]] = {}

    def is_here(self, rank: int) -> bool:
        """Returns whether this process holds a rank."""
        return task_of(self._devices[rank]) == self._index

    def ranks_here(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Returns the ranks that this process holds, in their order."""
        return tuple(rank for rank in ranks if self.is_here(rank))

    def of(self, mesh: Mesh) -> dtensor.Mesh:
        """DTensor's mesh of a mesh.

        Raises:
            MeshError: the mesh names a rank that the world does not have.
        """
        found = self._meshes.get(mesh)
        if found is None:
            remedy = (
                "make the mesh smaller, or on CPU call use('tensorflow', devices={needed}) before any TensorFlow "
                "operation"
            )
            check_ranks(mesh, "tensorflow", len(self._devices), remedy)
            found = self._meshes[mesh] = self._made(mesh.axis_names, mesh.shape, mesh.devices)
        return found

    def of_groups(self, mesh: Mesh, axes: Axes) -> tuple[dtensor.Mesh, tuple[int, ...]]:
        """[groups, places] along axes, and this process's ranks in the order of its local devices.

        The places of a group are in the order of ranks: DTensor's all_to_all misorders what it moves otherwise.
        """
        found = self._of_groups.get((mesh, axes))
        if found is None:
            self.of(mesh)
            groups = sorted(tuple(sorted(group)) for group in mesh.groups(axes))
            ranks = [rank for group in groups for rank in group]
            native = self._made(("o", "g"), (len(groups), len(groups[0])), ranks)
            found = self._of_groups[mesh, axes] = native, self.ranks_here(ranks)
        return found

    def _made(self, names: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> dtensor.Mesh:
        here = [place for place, rank in enumerate(ranks) if self.is_here(rank)]
        return dtensor.Mesh(
            list(names),
            np.arange(len(ranks)).reshape(shape),
            here,
            [self._devices[ranks[place]] for place in here],
            global_devices=[self._devices[rank] for rank in ranks] if self._count > 1 else None,
        )

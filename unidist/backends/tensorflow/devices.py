"""TensorFlow's devices: virtual ones on CPU, and their names as Keras gives them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from unidist.errors import BackendMismatchError, BackendNotAvailableError, MeshError

# Set by `unidist run --devices-per-process`: as many virtual CPU devices, where the program names no number.
DEVICES = "UNIDIST_CPU_DEVICES"


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


def find(devices: int | Sequence[str] | None) -> tuple[str, ...]:
    """TensorFlow's full names of the world's devices in rank order. Starts TensorFlow.

    Args:
        devices: None: the GPUs, else the CPUs; a number: the CPUs; names as "cpu:0": these, in this order.

    Raises:
        BackendNotAvailableError: TensorFlow has no such device.
        MeshError: a device is named twice, or none is named.
    """
    if devices is None or isinstance(devices, int):
        wanted = "CPU" if isinstance(devices, int) or not tf.config.list_physical_devices("GPU") else "GPU"
        return tuple(_full_names(wanted))
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

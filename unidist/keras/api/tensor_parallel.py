"""TensorParallelKeras: a model in, the same model sharded over all devices out, in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from unidist import session
from unidist.algebra import Mesh
from unidist.backends import registry
from unidist.backends.protocol import DistributionBackend, itemsize
from unidist.errors import BackendNotAvailableError, MeshError
from unidist.keras.api.models import describe, parallelize
from unidist.keras.driver import Row
from unidist.keras.strategies.strategy import ModelParallel

# What other libraries call them.
NAMES = {"pytorch": "torch", "nccl": "torch", "gloo": "torch", "tf": "tensorflow", "fallback": "sim"}
MODEL_AXIS, DATA_AXIS = "model", "data"


class TensorParallelKeras(keras.Model):  # type: ignore[misc]
    """A Keras model sharded over devices, with layouts found automatically.

    It stands before the model: compile, fit, evaluate, predict, save, summary and everything else are the model's
    own, so its `train_step`, its metrics and the files it saves are too.

    Args:
        model: a built Keras or KerasHub model; it is sharded in place, and remains usable by itself.
        world_size: over how many devices each layer is sharded. None: all. With several processes it must divide
            their number: the others hold copies that train on other rows.
        device_ids: the devices by name ("gpu:1") or rank, in the order of the shards. None: the first ones.
        distributed_backend: "torch" ("pytorch", "nccl", "gloo"), "jax", "tensorflow" ("tf"), "horovod", "sim"
            ("fallback") or a registered name. "auto": the backend in use, else the launcher's, else the devices that
            Keras on JAX or TensorFlow has, else the simulator.
        sequence_parallel: see ModelParallel.

    Raises:
        MeshError: the devices do not fit.
        LayoutError: the model is not built.
        BackendNotAvailableError, BackendMismatchError: the backend is not there, or not for this Keras backend.
        CapabilityError: sequence_parallel, with Keras on another backend than torch.

    Example:
        >>> import keras, unidist
        >>> _ = unidist.use("sim", devices=2)
        >>> inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
        >>> model = unidist.TensorParallelKeras(inner)
        >>> model.get_parallelism_info()["world_size"]
        2
    """

    def __init__(
        self,
        model: Any,
        world_size: int | None = None,
        device_ids: Sequence[int | str] | None = None,
        distributed_backend: str = "auto",
        *,
        sequence_parallel: bool = False,
    ) -> None:
        if world_size is not None and world_size < 1:
            raise MeshError(f"world_size must be at least 1, found {world_size}")
        adapter = _backend(distributed_backend, world_size, device_ids)
        mesh = _mesh(adapter, world_size, device_ids)
        super().__init__(name=f"tensor_parallel_{model.name}")
        self.model = parallelize(model, ModelParallel(mesh, model_axis=MODEL_AXIS, sequence_parallel=sequence_parallel))
        self.mesh = mesh
        self.built = True

    # the model's own -----------------------------------------------------------------------------------------------

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Called for what this object has not: Keras's own attributes of a model that was never compiled stay its own.
        held = _held(self)
        if held is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return held if name == "model" else getattr(held, name)

    # what it is ----------------------------------------------------------------------------------------------------

    def get_parallelism_info(self) -> dict[str, Any]:
        """Returns how the model is laid out, measured from the arrays that are held.

        Returns:
            backend, keras_backend, world_size, mesh (axis -> size), devices (names in the order of the mesh),
            parameters, sharded_parameters (elements), sharded_fraction, bytes_per_device, bytes_on_one_device
            (weights alone), layouts (path -> layout).
        """
        rows = self._rows(optimizer=False)
        elements = sum(math.prod(row.shape) for row in rows)
        sharded = sum(math.prod(row.shape) for row in rows if row.is_sharded)
        names = session.backend().list_devices()
        return {
            "backend": session.backend().name,
            "keras_backend": keras.config.backend(),
            "world_size": self.mesh.axis_size((MODEL_AXIS,)),
            "mesh": dict(self.mesh.axes),
            "devices": [names[rank] for rank in self.mesh.devices],
            "parameters": elements,
            "sharded_parameters": sharded,
            "sharded_fraction": sharded / elements if elements else 0.0,
            "bytes_per_device": sum(row.bytes_per_device for row in rows),
            "bytes_on_one_device": sum(map(_whole_bytes, rows)),
            "layouts": {row.path: str(row.layout) for row in rows},
        }

    def get_gradient_sharding_info(self) -> dict[str, Any]:
        """Returns what a device holds of the gradients and of the optimizer's states.

        A gradient is laid out as its variable is; so does a slot, measured once the optimizer is built (0 before).

        Returns:
            sharded_gradients, replicated_gradients (numbers of variables), gradient_bytes_per_device,
            gradient_bytes_on_one_device, optimizer_bytes_per_device, optimizer_bytes_on_one_device.
        """
        trained = {variable.path for variable in self.model.trainable_variables}
        rows = [row for row in self._rows(optimizer=False) if row.path in trained]
        slots = self._rows(optimizer=True)
        return {
            "sharded_gradients": sum(row.is_sharded for row in rows),
            "replicated_gradients": sum(not row.is_sharded for row in rows),
            "gradient_bytes_per_device": sum(row.bytes_per_device for row in rows),
            "gradient_bytes_on_one_device": sum(map(_whole_bytes, rows)),
            "optimizer_bytes_per_device": sum(row.bytes_per_device for row in slots),
            "optimizer_bytes_on_one_device": sum(map(_whole_bytes, slots)),
        }

    def _rows(self, *, optimizer: bool) -> list[Row]:
        rows = describe(self.model).rows
        count = len(self.model.variables)
        return list(rows[count:] if optimizer else rows[:count])


def _held(parallel: TensorParallelKeras) -> Any:
    """The model inside; None while Keras constructs the object around it. On torch it is a submodule."""
    own = vars(parallel)
    return own.get("model") or own.get("_modules", {}).get("model")


def _forwarded(name: str) -> Any:
    """A method that Keras's Model defines, and that the model in it answers."""

    def method(self: TensorParallelKeras, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"`{name}` of the model."
    return method


def _forwarded_property(name: str) -> property:
    def read(self: TensorParallelKeras) -> Any:
        held = _held(self)
        return getattr(super(TensorParallelKeras, self) if held is None else held, name)

    def write(self: TensorParallelKeras, value: Any) -> None:
        # While Keras constructs this object there is no model yet, and what it sets is a default.
        held = _held(self)
        if held is not None:
            setattr(held, name, value)

    return property(read, write, doc=f"`{name}` of the model.")


for _name in (
    *("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
    *("compute_loss", "compute_metrics", "get_metrics_result", "reset_metrics", "compile_from_config"),
    *("save", "save_weights", "load_weights", "export", "summary", "get_layer", "get_weights", "set_weights"),
    *("get_config", "get_compile_config", "to_json", "count_params", "compute_output_shape", "quantize"),
):
    setattr(TensorParallelKeras, _name, _forwarded(_name))
for _name in ("optimizer", "loss", "compiled", "stop_training", "history", "metrics", "metrics_names", "layers"):
    setattr(TensorParallelKeras, _name, _forwarded_property(_name))


def _backend(name: str, world_size: int | None, device_ids: Sequence[int | str] | None) -> DistributionBackend:
    name = NAMES.get(name, name)
    if registry.has_current() and name in ("auto", session.backend().name):
        return session.backend()
    if name == "auto":
        name = _found()
    by_number = [d for d in device_ids or () if isinstance(d, int)]
    count = max([world_size or 0, *(d + 1 for d in by_number)]) or None
    return session.use(name, devices=count if registry.entry(name).virtual else None)


def _found() -> str:
    """Returns the backend that the environment names.

    In a lone process it is that of Keras's own devices, else the simulator.
    """
    name, _ = registry.default_name()
    keras_backend = keras.config.backend()
    if not registry.entry(name).virtual or keras_backend == "torch":
        return name
    try:
        registry.find(keras_backend)
    except BackendNotAvailableError:
        return name
    return str(keras_backend)


def _mesh(adapter: DistributionBackend, world_size: int | None, device_ids: Sequence[int | str] | None) -> Mesh:
    names = adapter.list_devices()
    ranks = [_rank(one, names) for one in device_ids] if device_ids is not None else list(range(len(names)))
    size = world_size or len(ranks)
    if size > len(ranks):
        found = [names[r] for r in ranks]
        more = _how_to_get(adapter, size) if len(ranks) == len(names) else "name as many in device_ids"
        raise MeshError(f"world_size={size}, but there are {len(ranks)} devices: {found}: {more}")
    if adapter.process_count() == 1:
        return Mesh({MODEL_AXIS: size}, ranks[:size])
    if sorted(ranks) != list(range(len(names))) or len(ranks) % size:
        raise MeshError(
            f"world_size={size} on {len(ranks)} of {len(names)} devices: with several processes every device takes "
            "part, and world_size must divide their number"
        )
    if size == len(ranks):
        return Mesh({MODEL_AXIS: size}, ranks)
    return Mesh({DATA_AXIS: len(ranks) // size, MODEL_AXIS: size}, ranks)


def _how_to_get(adapter: DistributionBackend, count: int) -> str:
    """Returns what to do for so many devices.

    (The model itself has started JAX or TensorFlow: it is too late here.)
    """
    entry = registry.in_use()
    if entry.one_device:
        return f"start as many processes, with `unidist run --backend {adapter.name} -n {count} script.py`"
    virtual = "devices" if entry.virtual else "virtual CPU devices"
    return (
        f"call unidist.use({adapter.name!r}, devices={count}) before the model is made, which gives {count} {virtual}"
    )


def _rank(device: int | str, names: list[str]) -> int:
    name = device.replace("cuda:", "gpu:") if isinstance(device, str) else None
    if name in names:
        return names.index(name)
    if isinstance(device, int) and 0 <= device < len(names):
        return device
    raise MeshError(f"device_ids names {device!r}, but the devices are {names}")


def _whole_bytes(row: Row) -> int:
    return math.prod(row.shape) * itemsize(row.dtype)

"""Shows a layer's variables to torch: parameters that hold shards, and DTensors in a state dict.

DTensors are there if asked for.

`use("torch", tensor="dtensor")` makes `model.state_dict()` one of DTensors, which say where each shard belongs, so that
torch.distributed.checkpoint writes them and reads them under any layout. Layers compute with native shards all the
same: computing with DTensors was measured to take 1.2 times as long, and more with attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unidist.keras.torch import outside
from unidist.keras.torch.params.storage import Storage
from unidist.keras.torch.params.variables import DistributedVariable


class PlacedParameters(torch.nn.ParameterDict):
    """Path -> parameter of this process's (first) stored shard; never a gathered copy."""

    def __init__(self, variables: list[Any]) -> None:
        super().__init__()
        self._variables: dict[str, Any] = {}
        for variable in variables:
            self.add(variable)

    def add(self, variable: Any) -> None:
        self._variables[variable.path] = variable
        is_placed = isinstance(variable, DistributedVariable)
        self[variable.path] = variable._storage.parameter() if is_placed else variable.value

    def _storages(self, prefix: str) -> dict[str, Storage]:
        placed = {k: v._storage for k, v in self._variables.items() if k in self and isinstance(v, DistributedVariable)}
        for storage in placed.values():
            storage.parameter() if not storage.world.runs_several else outside.look(storage)
        return {prefix + key: storage for key, storage in placed.items()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        storages = self._storages(prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, storage in storages.items():
            if storage.world.backend.tensor == "dtensor":
                destination[key] = _as_dtensor(storage)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = {
            key: _own_part(place, state_dict[key])
            for key, place in self._storages(prefix).items()
            if isinstance(state_dict.get(key), DTensor)
        }
        super()._load_from_state_dict({**state_dict, **own}, prefix, *args)


def _as_dtensor(storage: Storage) -> DTensor:
    """A DTensor on the memory of the stored shard.

    Raises:
        CapabilityError: DTensor has no placements for how the variable is stored.
    """
    stored = storage.shardings.stored
    native = storage.world.backend.layout(stored)
    strides = torch.empty(stored.shape, device="meta").stride()
    return DTensor.from_local(
        storage.parameter().detach(),
        native.device_mesh,
        native.placements,
        run_check=False,
        shape=torch.Size(stored.shape),
        stride=strides,
    )


def _own_part(storage: Storage, value: DTensor) -> torch.Tensor:
    stored = storage.shardings.stored
    if tuple(value.shape) != stored.shape:
        return value.full_tensor()  # torch reports the wrong shape
    native = storage.world.backend.layout(stored) if storage.world.backend.has_dtensors else None
    if native is not None and value.device_mesh == native.device_mesh:
        return value.redistribute(placements=native.placements).to_local()
    return value.full_tensor()[stored.slices(storage.world.ranks[0])]

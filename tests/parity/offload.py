"""What processes run of slots that rest in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.parity import train
from tests.parity.models import CASES
from tests.parity.train import Spec


@dataclass
class Rested:
    """What a training came to, by the values of weights and slots, and where slots rest.

    Attributes:
        on_host, slots: bytes of them, as described, on the host and on the device.
        brought: how many copies were made.
        away: how many are on the device behind the training.
    """

    values: dict[str, Any]
    on_host: int
    slots: int
    brought: int
    away: int


def start_or_go_on(spec: Spec, directory: Path, goes_on: bool) -> Rested:
    """Trains a model and saves it; or restores it first, whatever was trained before."""
    import keras

    import unidist
    from unidist.keras.torch.params import host_memory

    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    case = CASES["mlp_ragged_adam"]
    data = case.data()
    bring = host_memory.Lanes.bring
    made: list[Any] = []

    def counted(lanes: Any, home: Any) -> Any:
        made.append(home.nbytes)
        return bring(lanes, home)

    with train.distributed(spec, case), mock.patch.object(host_memory, "TURN_BYTES", 1024):
        model = train.compiled(case)
        train.build(model, case, data)
        if goes_on:
            model.fit(**data, batch_size=4, verbose=0, shuffle=False)
            unidist.restore(model, directory)
        with mock.patch.object(host_memory.Lanes, "bring", counted):
            model.fit(**data, batch_size=4, verbose=0, shuffle=False)
        if not goes_on:
            unidist.save(model, directory)
    told = unidist.describe(model)
    slots = [v._storage for v in model.optimizer.variables if isinstance(v._storage, host_memory.HostStorage)]
    return Rested(
        {v.path.split("/", 1)[-1]: np.asarray(v) for v in (*model.variables, *model.optimizer.variables)},
        told.bytes_of("host"),
        told.bytes_of("slots"),
        len(made),
        sum(len(slot.homes) for slot in slots),
    )


def refused() -> None:
    import unidist

    unidist.DataParallel(offload="states")

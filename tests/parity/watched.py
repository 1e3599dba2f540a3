"""A training that `unidist.Telemetry` writes down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

import unidist
from tests.parity.going_on import BATCH
from tests.parity.models import CASES
from tests.parity.train import Spec, distributed

ROWS = 10


def run(spec: Spec, folder: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(the lines of this process, what it sent for each purpose by the ledger)."""
    keras.utils.clear_session(free_memory=False)
    with distributed(spec, CASES["mlp_ragged_adam"]):
        hidden = layers.Dense(8, activation="tanh", name="column")
        model = keras.Sequential([keras.Input((4,)), hidden, layers.Dense(2, name="row")])
        model.compile("sgd", "mse", jit_compile=keras.config.backend() == "jax")
        told = unidist.Telemetry(folder)
        with unidist.ledger() as traffic:
            x, y = np.ones((ROWS, 4), "float32"), np.ones((ROWS, 2), "float32")
            model.fit(x, y, batch_size=BATCH, epochs=2, callbacks=[told], verbose=0)
    sent: dict[str, float] = {}
    for event in traffic.events:
        sent[event.purpose] = sent.get(event.purpose, 0.0) + float(event.bytes)
    here = Path(folder) / f"rank-{unidist.backend().local_ranks()[0]}.jsonl"
    return [json.loads(line) for line in here.read_text().splitlines()], sent

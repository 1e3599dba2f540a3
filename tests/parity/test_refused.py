"""What a backend cannot do of all that large models are trained with, it refuses by name, as a strategy is made."""

from __future__ import annotations

import re

import pytest

from tests.parity.worlds import SETTINGS, Worlds

pytestmark = pytest.mark.processes

# By Keras's framework: the words in which a feature is refused. What is not named here is served.
ON_TENSORFLOW = {
    "contexts": r"an axis of contexts \('context',\)",
    "ring": r"an axis of contexts \('context',\)|attention='ring'",
    "sequence_parallel": "sequence_parallel=True",
    "dispatch": "experts='dispatch'",
    "axis of experts": r"an axis of experts \('expert',\)",
    "remat": "remat='block'",
    "offload": "offload='states'",
    "per_tensor_rows": "per_tensor_rows=True",
}
REFUSED = {
    "torch": {},
    "jax": {name: ON_TENSORFLOW[name] for name in ("ring", "sequence_parallel", "offload")},
    "tensorflow": ON_TENSORFLOW,
}
# DTensor refuses rows that two axes cut as a model is trained: tests/parity/test_replicas.py.
OVER_HOROVOD = {"replicas": "zero=1", "exact_random": "exact_random=True"}
PLACES = ["sim-torch", "torch-2", "horovod-2", "sim-jax", "sim-tensorflow", "tensorflow-4", "horovod-2-tensorflow"]


@pytest.mark.parametrize("setting", PLACES)
def test_what_is_not_served_is_refused_by_name(setting: str, worlds: Worlds) -> None:
    refused = REFUSED[SETTINGS[setting].keras] | (OVER_HOROVOD if setting == "horovod-2-tensorflow" else {})
    for found in worlds.get(setting).call("tests.keras.refused:answers"):
        assert set(found) >= set(refused)
        for name, said in found.items():
            if name in refused:
                assert re.match(f"CapabilityError: .*({refused[name]})", said), (name, said)
            else:
                assert said == "", (name, said)

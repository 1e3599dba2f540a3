"""What several devices hold the whole of is the same on all of them, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.worlds import SETTINGS, Worlds

pytestmark = pytest.mark.processes
# Horovod's are counted with torch.
PLACES = [
    ("sim-torch", "2x2", 0),
    ("sim-torch", "dp", 3),
    ("torch-2", "dp", 1),
    ("torch-4", "2x2", 3),
    ("horovod-2", "dp", 1),
    ("jax-2x2", "2x2 across", 1),
    ("tensorflow-2x2", "2x2", 1),
]


def copies(kind: str, zero: int) -> dict[tuple[str, str], list[str]]:
    """(path, region) -> a digest of each copy of it on this process's devices, after a training with dropout and
    batch statistics."""
    import hashlib

    import keras
    import numpy as np

    from tests.support import nets

    with nets.begun(kind, zero):
        first, *rest = nets.regularized().layers
        model = keras.Sequential([first, keras.layers.Dropout(0.5, name="drop"), *rest], name="plain")
        nets.crossed(model, nets.adam(), metrics=["accuracy"])
    x, y = nets.rows()
    model.fit(x, y, batch_size=nets.BATCH, shuffle=False, verbose=0)
    found: dict[tuple[str, str], list[str]] = {}
    for variable in [*model.weights, *model.optimizer.variables]:
        for region, value in _of(variable, keras.config.backend()):
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            found.setdefault((variable.path, region), []).append(digest)
    return found


def _of(variable: Any, backend: str) -> list[tuple[str, Any]]:
    if backend == "jax":
        return [(str(shard.index), shard.data) for shard in variable.value.addressable_shards]
    if backend == "torch":
        storage = variable._storage
        pairs = [(storage.shardings.stored.region(rank), shard) for rank, shard in storage.shards.items()]
        return [(str(region), shard.detach().numpy()) for region, shard in pairs if "seed" not in variable.path]
    value = variable._value
    if not hasattr(value, "layout"):
        return [("", value.numpy())]
    from tensorflow.experimental import dtensor

    if not value.layout.is_fully_replicated():
        return []
    return [("", part.numpy()) for part in dtensor.unpack(value.read_value())]


@pytest.mark.parametrize(("setting", "kind", "zero"), PLACES)
def test_they_are_the_same_to_the_last_bit(setting: str, kind: str, zero: int, worlds: Worlds) -> None:
    """Moving statistics and slots among them."""
    digests: dict[tuple[str, str], list[str]] = {}
    for found in worlds.get(setting).call(copies, kind, zero):
        for key, own in found.items():
            digests.setdefault(key, []).extend(own)
    assert any("moving_variance" in path for path, _ in digests)
    assert max(len(of) for of in digests.values()) == SETTINGS[setting].processes * (SETTINGS[setting].devices or 1)
    for key, of in digests.items():
        assert len(set(of)) == 1, key

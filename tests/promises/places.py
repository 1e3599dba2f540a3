"""Where promises are kept: each backend in its processes, under its strategies, at its stages of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from tests.parity.worlds import SETTINGS
from tests.support.sampling import each_value, unless_all

# (setting, strategy, stage of ZeRO)
Place = tuple[str, str, int]
# The cheapest first: TensorFlow compiles a step for seconds, in each process of its own.
KINDS = {
    "sim-torch": ("dp", "2x2"),
    "torch-2": ("dp",),
    "torch-4": ("2x2",),
    "horovod-2": ("dp",),
    "sim-jax": ("dp", "2x2"),
    "tensorflow-4": ("2x2",),
    "jax-2x2": ("2x2 across",),
    "horovod-2-tensorflow": ("dp",),
    "tensorflow-2x2": ("2x2",),
}
# JAX's and DTensor's one program is the same in one process and in several: these are for promises that processes keep
# with each other, which name their places.
APART = unless_all(("jax-2x2", "tensorflow-2x2"), ())
# Over Horovod Keras on TensorFlow trains whole weights.
STAGES = {"horovod-2-tensorflow": (0,)}


def everywhere(values: Mapping[str, Sequence[Any]], fits: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Rows of a place and a value: each setting, each stage of ZeRO, and on each engine each of its values.

    Args:
        values: by setting or Keras backend, what a promise is kept for there.
        fits: whether a row (setting, strategy, stage, value) has a meaning.
    """
    engines = {setting: setting if setting in values else SETTINGS[setting].keras for setting in KINDS}
    rows = [
        (setting, kind, zero, value)
        for setting, kinds in KINDS.items()
        if setting not in APART
        for kind in kinds
        for zero in STAGES.get(setting, range(4))
        for value in values.get(engines[setting], ())
    ]
    costs = list(KINDS)

    def columns(row: tuple[Any, ...]) -> tuple[Hashable, ...]:
        return row[0], row[2], (engines[row[0]], row[3])

    return each_value([row for row in rows if fits(*row)], columns, lambda row: costs.index(row[0]))

"""What unidist.plan says that a step sends, beside what it sends: `python -m tests.keras.hub.planned [BACKBONE ...]`.

Keras on torch, virtual devices: data parallel, with ZeRO-3 (all in one unit, and in units of a layer or two), under
found tensor parallelism, with sequences cut, over contexts, and on several axes. Both are bytes of a device. Metrics,
and the sums of one number by which a loss adds up places, are no part of a plan.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any
from unittest import mock

# Kind -> axes of the mesh.
KINDS = {
    "data": {"data": 2},
    "zero=3": {"data": 2},
    "zero=3 in units": {"data": 2},
    "replicas, zero=1": {"replica": 2, "data": 2},
    "replicas, zero=3 in units": {"replica": 2, "data": 2},
    "model": {"model": 2},
    "model of 4": {"model": 4},
    "sequences": {"model": 2},
    "data x model": {"data": 2, "model": 2},
    "data x sequences, zero=1": {"data": 2, "model": 2},
    "contexts": {"context": 3},
    "contexts gathered": {"context": 2},
    "data x contexts, zero=3": {"data": 2, "context": 2},
    "contexts x model": {"context": 2, "model": 2},
}
# Bytes: a block of these backbones has six to ten times as many.
UNIT = 2000


def bytes_of_a_step(name: str, kind: str) -> tuple[Fraction | int, Fraction | int]:
    """Planned, and sent in a step that is not the first."""
    import numpy as np

    import unidist
    from tests.keras.hub import zoo

    mesh, zero = zoo.mesh(KINDS[kind]), int((kind.partition("zero=")[2] or "0")[0])
    how: dict[str, Any] = {"zero": zero, "sequence_parallel": "sequences" in kind}
    how["attention"] = "gather" if "gathered" in kind else "auto"
    if "replicas" in kind:
        how |= {"shard_axis": "data", "data_axis": ("replica", "data")}
    is_data = KINDS[kind].keys() <= {"replica", "data"}
    of_data = {name: how[name] for name in ("zero", "shard_axis") if name in how}
    strategy = unidist.DataParallel(mesh, **of_data) if is_data else unidist.ModelParallel(mesh, **how)
    with _units(kind), zoo.quietly(), strategy.scope():
        model = zoo.with_head(zoo.BACKBONES[name]())
        model.compile("adamw", "mse")
        x, y = zoo.inputs(model), np.zeros((zoo.ROWS, 3), "float32")
        model.train_on_batch(x, y)
        with unidist.ledger() as traffic:
            model.train_on_batch(x, y)
        plan = unidist.plan(model, mesh, batch=zoo.ROWS, sequence=zoo.LENGTH, **how)
    assert not plan.estimated, plan.estimated
    number = 8 if "context" in KINDS[kind] else 0
    planned, sent = (
        sum(e.bytes for e in ledger.events if e.purpose not in ("metrics", "logs") and e.bytes > number)
        for ledger in (plan.predicted, traffic)
    )
    return planned, sent


@contextlib.contextmanager
def _units(kind: str) -> Iterator[None]:
    from unidist.keras.torch.params import param_groups
    from unidist.planner import predicting

    with contextlib.ExitStack() as stack:
        for module in (param_groups, predicting) if kind.endswith("units") else ():
            stack.enter_context(mock.patch.object(module, "UNIT_BYTES", UNIT))
        yield


def main(names: list[str]) -> None:
    import unidist
    from tests.keras.hub import zoo

    unidist.use("sim", devices=4)
    for name in names or zoo.BACKBONES:
        for kind in KINDS:
            planned, sent = bytes_of_a_step(name, kind)
            besides = "" if planned == sent else f", {sent - planned:+,}"
            print(f"{name:12} {kind:25} planned {planned:>8,}, sent {sent:>8,}{besides}", flush=True)


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "torch"
    main(sys.argv[1:])

"""What unidist.plan says that a step sends, beside what it sends: `python -m tests.keras.hub.planned [BACKBONE ...]`.

Keras on torch, two virtual devices: data parallel, with ZeRO-3 (all in one unit, and in units of a layer or two), and
under found tensor parallelism. Both are bytes of a device. Metrics are no part of a plan.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from unittest import mock

KINDS = ("data", "zero=3", "zero=3 in units", "model")
# Bytes: a block of these backbones has six to ten times as many.
UNIT = 2000
# Tensor parallelism may send besides: the gradients of small weights, or of a table, between the layers of a pair; what
# is gathered for a block that is called more than once.
BESIDES = ("gemma3", "qwen3", "gpt-oss", "t5", "albert")


def bytes_of_a_step(name: str, kind: str) -> tuple[int | float, int | float]:
    """Planned, and sent in a step that is not the first."""
    import numpy as np

    import unidist
    from tests.keras.hub import zoo

    mesh = zoo.mesh({"model" if kind == "model" else "data": 2})
    zero = 3 if kind.startswith("zero") else 0
    strategy = unidist.ModelParallel(mesh) if kind == "model" else unidist.DataParallel(mesh, zero=zero)
    with _units(kind), zoo.quietly(), strategy.scope():
        model = zoo.with_head(zoo.BACKBONES[name]())
        model.compile("adamw", "mse")
        x, y = zoo.inputs(model), np.zeros((zoo.ROWS, 3), "float32")
        model.train_on_batch(x, y)
        with unidist.ledger() as traffic:
            model.train_on_batch(x, y)
        plan = unidist.plan(model, mesh, batch=zoo.ROWS, sequence=zoo.LENGTH, zero=zero)
    return plan.predicted.bytes(), traffic.bytes() - traffic.bytes(purpose="metrics")


@contextlib.contextmanager
def _units(kind: str) -> Iterator[None]:
    from unidist.keras.torch.values import units
    from unidist.planner import predicting

    with contextlib.ExitStack() as stack:
        for module in (units, predicting) if kind.endswith("units") else ():
            stack.enter_context(mock.patch.object(module, "UNIT_BYTES", UNIT))
        yield


def main(names: list[str]) -> None:
    import unidist
    from tests.keras.hub import zoo

    unidist.use("sim", devices=2)
    for name in names or zoo.BACKBONES:
        for kind in KINDS:
            planned, sent = bytes_of_a_step(name, kind)
            besides = "" if planned == sent else f", {sent - planned:+,}"
            print(f"{name:12} {kind:16} planned {planned:>8,}, sent {sent:>8,}{besides}", flush=True)


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "torch"
    main(sys.argv[1:])

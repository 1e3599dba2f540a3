"""Carriers in real processes: over torch.distributed, and over Horovod on torch."""

from __future__ import annotations

import pytest

import unidist
from tests import preloaded
from tests.torch.sharded import programs
from unidist.ledger import ledger
from unidist.testing.processes import ProcessWorld


def join(name: str) -> None:
    unidist.use(name)


def trained() -> tuple[dict[str, object], dict[str, int]]:
    with ledger() as traffic:
        found = programs.trained()
    return found, {op: traffic.count(op) for op in ("all_reduce", "reduce_scatter", "all_gather")}


@pytest.mark.processes
@pytest.mark.parametrize("name", ["torch", "horovod"])
def test_a_net_and_rows_in_two_processes(name: str) -> None:
    with ProcessWorld(2, setup=join, setup_args=(name,), preload=preloaded.TORCH) as world:
        results = world.call(trained)
    for found, traffic in results:
        assert found["gathers"] == {}
        assert float(found["columns"]) < 1e-10
        assert float(found["rows"]) < 1e-10
        assert min(traffic.values()) > 0

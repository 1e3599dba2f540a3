"""What `unidist.Telemetry` writes in several processes, compared with the data and with the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.going_on import BATCH
from tests.parity.train import Spec
from tests.parity.worlds import DATA_2, GRID, Worlds

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("setting", "spec", "steps"),
    [("torch-2", DATA_2, "gradient"), ("jax-2x2", GRID, "train step (compiled)")],
)
def test_each_process_tells_of_all_rows_and_of_its_own_bytes(
    setting: str, spec: Spec, steps: str, worlds: Worlds, tmp_path: Path
) -> None:
    for lines, sent in worlds.get(setting).call("tests.parity.watched:run", spec, str(tmp_path)):
        told = [line for line in lines if "seconds" in line]
        assert [line["step"] for line in told] == [1, 2, 3, 4, 5, 6]
        rows = [round(line["rows_per_second"] * line["seconds"], 6) for line in told]
        assert rows == [BATCH, BATCH, 2] * 2
        assert sent[steps] > 0
        if setting.startswith("jax"):
            # A step is one program: read once for each number of rows, and nothing else is sent in it.
            assert sum(line["bytes_per_step"] for line in told) == pytest.approx(sent[steps])
            assert {line["exposed_seconds"] for line in told} == {None}
        else:
            assert sum(line["bytes_per_step"] for line in told) >= sent[steps]
        assert all(line["memory"]["process"] > 1 << 20 for line in told)
        assert all(line["logs"] == {} for line in told), "nobody has asked for a step's logs"
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1

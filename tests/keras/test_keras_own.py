"""ci/keras_own.py puts a strategy in force for tests that know nothing of it, and goes on where a process dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import keras_own
from ci.keras_own import Outcome, Pass

pytestmark = pytest.mark.processes
PROGRAM = """
import os

import keras
import numpy as np
from keras.src import testing

import unidist


class Own(testing.TestCase):
    def test_a_strategy(self):
        keras.utils.clear_session()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with unidist.ledger() as sent:
            model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        assert [row.local_shape for row in unidist.describe(model).sharded][0] == (1, 1)
        assert sent.count("all_gather") > 0

    def test_b_dies(self):
        os._exit(3)

    def test_c_fails(self):
        raise ValueError("as it is")

    def test_d_is_skipped(self):
        self.skipTest("not here")
"""


def test_a_strategy_is_in_force_and_a_process_that_dies_is_one_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a_test.py").write_text(PROGRAM)
    monkeypatch.setattr(keras_own, "_source", lambda: tmp_path)
    found = keras_own.outcomes_of(Pass("sim-zero3"), ["models.a_test"], "0/1")
    assert found == {
        "models.a_test.Own.test_a_strategy": Outcome("passed"),
        "models.a_test.Own.test_b_dies": Outcome("failed", "the process ended by 3 at it"),
        "models.a_test.Own.test_c_fails": Outcome("failed", "ValueError: as it is"),
        "models.a_test.Own.test_d_is_skipped": Outcome("skipped", "Skipped: not here"),
    }


OPERATIONS = """
import numpy as np
from keras.src import ops, testing


class Own(testing.TestCase):
    def test_carriers(self):
        x = np.random.random((4, 3)).astype("float32")
        y = ops.add(x, 1.0)
        assert type(y).__name__ == "ShardedTensor"
        self.assertAllClose(y, x + 1.0)

    def test_a_part(self):
        self.assertEqual(ops.convert_to_tensor(np.ones((4, 3))).local.shape, (4, 3))

    def test_none(self):
        self.assertAllClose(ops.add(1.0, 2.0), 3.0)
"""


def test_operations_run_on_carriers_in_each_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "a_test.py").write_text(OPERATIONS)
    monkeypatch.setattr(keras_own, "_source", lambda: tmp_path)
    found = keras_own.outcomes_of(Pass("carriers-ops"), ["ops.a_test"], "0/1")
    # One on each of two ranks, three times, and of three.
    assert found["ops.a_test.Own.test_carriers"] == Outcome("passed", carriers=9)
    assert found["ops.a_test.Own.test_none"] == Outcome("passed")
    assert found["ops.a_test.Own.test_a_part"].why.startswith("AssertionError: [rows] ")

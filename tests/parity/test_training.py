"""Training on many devices equals training on one, on every backend and under every strategy.

The reference is plain Keras in a process of its own, on the same Keras backend. 1e-5 is the bound everywhere here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import pytest

from tests.parity.compare import assert_same_logs, assert_same_values, moved
from tests.parity.models import CASES, Case
from tests.parity.train import Result, Spec
from tests.parity.worlds import ALONE, DATA_2, DATA_4, GRID, MODEL_4, SETTINGS, Alone, Setting, Worlds
from tests.support.sampling import each_value, unless_all

pytestmark = pytest.mark.processes

# JAX and DTensor compile every training anew, for seconds: there each strategy meets the cases that can break it.
# Not functional on TensorFlow: test_tensorflow.py says why.
_COMPILED: dict[str, dict[Spec, tuple[str, ...]]] = {
    # The same model trains on in the simulator of both in test_saving.py.
    "sim-tensorflow": unless_all({}, {GRID: ("mlp_ragged_adam",)}),
    "sim-jax": unless_all({}, {DATA_4: ("mlp_ragged_adam",)}),
    "tensorflow-4": {
        # Statistics of batches: test_tensorflow.py, in two processes.
        DATA_4: unless_all(("mlp_ragged_adam",), ("mlp_ragged_adam", "mlp_sample_weight", "conv_norm")),
        MODEL_4: unless_all((), ("mlp_clipped",)),
        # Keras makes sample weights of class weights, and what is particular to "residual" is in "contrast".
        GRID: unless_all(("mlp_sample_weight", "contrast"), tuple(case for case in CASES if case != "functional")),
    },
    # DTensor's one program is the same in one process and in two: more of them are in tests/promises.
    "tensorflow-2x2": {
        # Each process's own rows, statistics of batches in two processes, and lookups: test_tensorflow.py.
        DATA_4: unless_all((), ("mlp_ragged_adam", "mlp_sample_weight", "conv_norm", "tagger")),
        MODEL_4: ("mlp_clipped",),
        GRID: unless_all((), ("mlp_sample_weight", "contrast")),
    },
    # The like of the others: tests/keras/jax/test_training.py, with one process and with two.
    "jax-4": {
        MODEL_4: ("residual",),
        GRID: unless_all(("conv_norm", "tagger"), tuple(CASES)),
    },
    "jax-2x2": {
        DATA_4: ("mlp_class_weight",),
        MODEL_4: unless_all((), ("mlp",)),
        GRID: unless_all(("contrast",), ("mlp_sample_weight", "contrast")),
    },
    # Gradients are averaged behind Keras's own step, whatever the model; statistics of batches are in tests/promises.
    "horovod-2-tensorflow": {DATA_2: unless_all(("mlp_ragged_adam", "tagger"), tuple(CASES))},
}


# Horovod's processes agree on each collective every millisecond, which is slow with four on few cores.
_ON_HOROVOD: dict[Spec, tuple[str, ...]] = {
    **unless_all({}, {DATA_4: ("mlp_ragged_adam", "conv_norm"), MODEL_4: ("residual",)}),
    GRID: unless_all(("contrast",), ("mlp_ragged_adam", "conv_norm", "tagger", "contrast")),
}


_EXPLICIT = ("sim-torch", "torch-2", "torch-4", "horovod-2", "horovod-4")


@dataclass(frozen=True)
class Training:
    """One training on many devices: each process's result, and one device's."""

    setting: str
    spec: Spec
    case: Case
    results: list[Result]
    wanted: Result


def _trainings() -> list[tuple[str, Spec, str]]:
    every = [
        (setting.name, spec, case)
        for setting in SETTINGS.values()
        for spec in setting.specs
        for case in _cases(setting, spec)
    ]
    # The driver on torch is one for all of these: each setting meets each strategy, and each strategy each case. The
    # others are chosen by hand above.
    chosen = each_value(
        [row for row in every if row[0] in _EXPLICIT],
        lambda row: (row[:2], (row[1].shape, row[2])),
        cost=lambda row: SETTINGS[row[0]].processes,
    )
    return [row for row in every if row[0] not in _EXPLICIT or row in chosen]


def _cases(setting: Setting, spec: Spec) -> Iterable[str]:
    if setting.name == "horovod-4":
        return _ON_HOROVOD.get(spec, ())
    if setting.name in _COMPILED:
        return _COMPILED[setting.name].get(spec, ())
    return CASES


@pytest.fixture(scope="session", params=_trainings(), ids=lambda p: f"{p[0]}-{p[1].name}-{p[2]}")
def training(request: pytest.FixtureRequest, alone: Alone, worlds: Worlds) -> Training:
    setting, spec, case = request.param
    wanted = alone.train(SETTINGS[setting].keras, case)
    return Training(setting, spec, CASES[case], worlds.train(setting, case, spec), wanted)


def test_first_weights_are_one_devices(training: Training) -> None:
    for result in training.results:
        assert_same_values(result.start, training.wanted.start, 0.0)


def test_losses_and_metrics_of_each_step_are_one_devices(training: Training) -> None:
    assert len(training.wanted.logs) == training.case.steps >= 5
    for result in training.results:
        assert_same_logs(result.logs, training.wanted.logs)


def test_weights_and_moving_statistics_are_one_devices(training: Training) -> None:
    assert training.case.late or moved(training.wanted.start, training.wanted.weights) > 0.01
    for result in training.results:
        assert_same_values(result.weights, training.wanted.weights)


def test_evaluate_and_predict_are_whole_on_every_process(training: Training) -> None:
    for result in training.results:
        assert_same_logs([result.evaluate], [training.wanted.evaluate])
        assert_same_values(result.predict, training.wanted.predict)


def test_what_the_rules_name_is_sharded_and_nothing_else(training: Training) -> None:
    shards = training.spec.size("model")
    for result in training.results:
        model_rows = {row.path: row for row in result.variables if row.path in result.weights}
        assert set(model_rows) == set(result.weights)
        ruled = {path for path in model_rows if training.spec.kind == "model" and training.case.is_ruled(path)}
        assert {path for path, row in model_rows.items() if row.is_sharded} == ruled
        assert len(ruled) >= (training.spec.kind == "model")
        for path in ruled:
            row = model_rows[path]
            whole, held = (_size(shape) for shape in (row.shape, row.local_shape))
            assert whole == held * shards
            assert row.bytes_per_device == 4 * held
        slots = [row for row in result.variables if row.path not in result.weights and row.is_sharded]
        assert len(slots) == _slots(training.case) * len(ruled)


def test_something_was_sent(training: Training) -> None:
    case, spec = training.case, training.spec
    for result in training.results:
        sent = {op: bytes_ for op, (count, bytes_) in result.traffic.items() if count and op != "barrier"}
        assert sum(sent.values()) > 0
        if spec.kind == "data":
            # Every gradient is reduced over all devices in every step: at least the ring bound of an all-reduce.
            n = spec.size("data")
            # On TensorFlow every device computes the whole of a batch that does not divide, and over Horovod gradients
            # of lookups are sparse: their rows are gathered.
            on_tensorflow = SETTINGS[training.setting].keras == "tensorflow"
            over_dtensor = on_tensorflow and SETTINGS[training.setting].backend != "horovod"
            steps = case.steps_that_divide(n) if over_dtensor else case.steps
            reduced = sum(sent.values()) if on_tensorflow else sent["all_reduce"]
            assert reduced >= Fraction(2 * (n - 1), n) * result.trainable_bytes * steps > 0


def _size(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _slots(case: Case) -> int:
    """Optimizer variables for each trainable variable."""
    return {"momentum": 1, "adam": 2, "clipped": 2}[case.optimizer]


def test_one_devices_numbers_are_the_same_on_every_keras_backend(alone: Alone) -> None:
    """From the same first weights: so all backends agree with each other."""
    wanted, *others = (alone.train(keras, "mlp_ragged_adam", numpy_weights=True) for keras in ALONE)
    for found in others:
        assert_same_values(found.start, wanted.start, 0.0)
        assert_same_logs(found.logs, wanted.logs)
        assert_same_values(found.weights, wanted.weights)


@pytest.mark.parametrize("setting", ["torch-4", "jax-4", "tensorflow-4"])
def test_devices_in_another_order_change_nothing(setting: str, alone: Alone, worlds: Worlds) -> None:
    wanted = alone.train(SETTINGS[setting].keras, "mlp_ragged_adam")
    turned = Spec("model", GRID.axes, devices=(3, 1, 0, 2))
    for result in worlds.train(setting, "mlp_ragged_adam", turned):
        assert_same_logs(result.logs, wanted.logs)
        assert_same_values(result.weights, wanted.weights)
        assert any(row.is_sharded for row in result.variables)
        assert sum(count for count, _ in result.traffic.values()) > 0

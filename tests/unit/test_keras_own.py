"""ci/keras_own.py judges what became of Keras's own tests by ci/keras_own.toml."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ci.keras_own import (
    API,
    KINDS,
    SAMPLED,
    WHOLE,
    Expected,
    Outcome,
    Pass,
    expectations,
    is_in_sample,
    judged,
    name_of,
)

SIM = Pass("sim-data")
FAILED, PASSED, SKIPPED = Outcome("failed", "as it is"), Outcome("passed"), Outcome("skipped")
EXPECTED = Expected("traces", "it counts", ("models.a_test.*",), ("sim-*",))


@pytest.mark.parametrize(
    ("became", "entry", "wrong"),
    [
        ({"models.a_test.A.x": FAILED}, EXPECTED, []),
        ({"models.a_test.A.x": SKIPPED}, EXPECTED, []),
        ({"models.b_test.A.x": FAILED}, EXPECTED, ["FAILED: models.b_test.A.x: as it is"]),
        (
            {"models.a_test.A.x": PASSED},
            EXPECTED,
            ["PASSES, take it out of keras_own.toml: models.a_test.A.x (it counts)"],
        ),
        ({"models.a_test.A.x": PASSED}, Expected("traces", "", EXPECTED.tests, sometimes=True), []),
    ],
    ids=["named fails", "named is skipped", "unnamed fails", "named passes", "named passes sometimes"],
)
def test_what_is_not_as_expected(became: Mapping[str, Outcome], entry: Expected, wrong: list[str]) -> None:
    assert judged(SIM, became, [entry])[0] == wrong


def test_entries_are_of_their_passes() -> None:
    test = "models.a_test.A.x"
    assert not EXPECTED.names(Pass("jax-data"), test)
    of_torch = Expected("plain", "", (test,), ("torch",))
    assert [name for name in ("sim-data", "torch-zero3", "plain-torch") if of_torch.names(Pass(name), test)]
    assert not of_torch.names(Pass("plain-jax"), test)
    # Keras alone has no other excuse than its own.
    assert not Expected("limit", "", (test,)).names(Pass("plain-torch"), test)


@pytest.mark.parametrize(("limits", "count"), [(2, 0), (3, 1)])
def test_one_in_a_hundred_may_be_a_limit(limits: int, count: int) -> None:
    became = {f"models.a_test.A.x{number}": FAILED if number < limits else PASSED for number in range(200)}
    became |= {f"models.b_test.A.x{number}": SKIPPED for number in range(200)}
    entry = Expected("limit", "", [f"models.a_test.A.x{number}" for number in range(limits)])
    assert len(judged(SIM, became, [entry])[0]) == count


def test_operations_need_a_carrier() -> None:
    became = {"ops.a_test.A.x": PASSED, "ops.a_test.A.y": Outcome("passed", carriers=2)}
    assert judged(Pass("carriers-ops"), became, [])[0] == []
    del became["ops.a_test.A.y"]
    assert judged(Pass("carriers-ops"), became, [])[0] == ["NO CARRIERS: none of the tests was given any"]


def test_files_have_their_passes() -> None:
    every = [API, "models.a_test", "ops.a_test", "losses.a_test"]
    assert {name: Pass(name).files(every) for name in ("sim-data", "sim-api", "carriers-ops", "plain-torch")} == {
        "sim-data": ["models.a_test", "losses.a_test"],
        "sim-api": [API],
        "carriers-ops": ["ops.a_test", "losses.a_test"],
        "plain-torch": every[1:],
    }


def test_the_list_is_whole() -> None:
    for entry in expectations():
        assert entry.kind in KINDS
        assert entry.why
        assert entry.tests
        assert all(any(entry.names(Pass(one), test) for one in (*WHOLE, *SAMPLED)) for test in entry.tests), entry


def test_a_sample_is_the_same_for_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [f"models/a_test.py::A::x{number}" for number in range(1000)]
    drawn = {}
    for seed in ("0", "0", "1"):
        monkeypatch.setenv("KERAS_OWN_SAMPLE", f"{seed}/0.1")
        found = {test for test in tests if is_in_sample(test, "data")}
        assert drawn.setdefault(seed, found) == found
        assert 60 < len(found) < 140
    assert drawn["0"] != drawn["1"]
    assert name_of(tests[0]) == "models.a_test.A.x0"

"""Puts a strategy in force for each of Keras's own tests, and writes down what became of it: see ci/keras_own.py.

Keras's tests import `skip_if_backend` from a module of this name, which its distributions do not carry.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import tempfile
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ["KERAS_OWN_FOLDER"])
BACKEND, DEVICES, UNDER = (os.environ[f"KERAS_OWN_{name}"] for name in ("BACKEND", "DEVICES", "UNDER"))
# Ranks of one run have one such folder, and write a file each.
TOLD = FOLDER / f"told-{os.environ.get('RANK', '0')}.jsonl"

if BACKEND and BACKEND != "carriers":
    import unidist

    unidist.use(BACKEND, **({"devices": int(DEVICES)} if DEVICES else {}))

import keras  # noqa: E402 - the backend is chosen before
from keras.src.testing import TestCase  # noqa: E402

from ci.keras_own import is_in_sample, name_of  # noqa: E402

if BACKEND == "carriers":
    import carriers

    carriers.put_on()
_carried: dict[str, int] = {}


def skip_if_backend(given_backend: str, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(keras.backend.backend() == given_backend, reason=reason)


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: Keras's")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set((FOLDER / "done").read_text().splitlines())
    chosen = [item for item in items if name_of(item.nodeid) not in done and is_in_sample(item.nodeid, UNDER)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen
    if UNDER == "api":
        for node in {node for item in items for node in item.listchain()}:
            node.own_markers[:] = [marker for marker in node.own_markers if marker.name != "skipif"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    _tell(test=name_of(item.nodeid), became="begun")
    # The same numbers on all ranks, and in each run.
    keras.utils.set_random_seed(zlib.crc32(name_of(item.nodeid).encode()))
    with _strategy():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    if BACKEND == "carriers":
        method, instance = item.obj.__func__, item.instance

        def on_carriers() -> None:
            _carried[item.nodeid] = carriers.runs(method, instance, name_of(item.nodeid))

        item.obj = functools.wraps(method)(on_carriers)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        told = {"became": report.outcome, "why": _first_line(report), "seconds": report.duration}
        _tell(test=name_of(report.nodeid), **told, carriers=_carried.get(report.nodeid, 0))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if not report.passed:
        _tell(test=name_of(report.nodeid), became=report.outcome, why=_first_line(report))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not session.shouldfail:
        _tell(test="", became="passed")
    # A launcher ends all ranks where one ends with an error.
    session.exitstatus = 0


def _strategy() -> Any:
    strategies = {
        "data": lambda: unidist.DataParallel(),
        "zero3": lambda: unidist.DataParallel(zero=3),
        "model": lambda: unidist.ModelParallel(),
    }
    return strategies[UNDER]().scope() if UNDER in strategies else contextlib.nullcontext()


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else report.longreprtext).partition("\n")[0]


def _tell(**what: Any) -> None:
    with TOLD.open("a") as file:
        file.write(json.dumps(what) + "\n")


if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    # Ranks save into one folder, as processes on one file system do, and read what one of them has written. What no
    # test asks for is each process's own: the one that writes makes other folders.
    made, own = itertools.count(), tempfile.mkdtemp

    def _folder(*given: Any, **named: Any) -> str:
        callers = (frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(sys._getframe(1)))
        if not next(name for name in callers if name != "tempfile").endswith(("_test", ".test_case")):
            return own(*given, **named)
        folder = FOLDER / "saved" / str(next(made))
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)

    TestCase.get_temp_dir = _folder
    tempfile.mkdtemp = _folder

#!/usr/bin/env python3
"""Keras's own tests, run under a strategy: `python3 ci/keras_own.py`.

    python3 ci/keras_own.py                             # a sample of every pass, at most two minutes on two cores
    python3 ci/keras_own.py --all                       # every pass, whole
    python3 ci/keras_own.py sim-data --only callbacks   # the files of one pass whose names begin so
    python3 ci/keras_own.py plain-torch                 # a pass without unidist, which ci/keras_own.toml is checked by
    python3 ci/keras_own.py carriers-ops                # the tests of keras.ops on tensors that carry their layout
    python3 ci/keras_own.py --keras nightly             # with another Keras: "nightly" or a version

A pass is BACKEND-UNDER: sim, torch (2 processes), jax or tensorflow (2 devices) under `DataParallel()` (data),
`DataParallel(zero=3)` (zero3) or found `ModelParallel()` (model). "api" is Keras's own file of its distribution API,
without the skips where the backend is not JAX. "carriers-ops" are the tests of `keras.ops`, `keras.random`, losses and
metrics on torch, under no strategy: each runs on two ranks with its inputs cut by rows, cut along other dims, or as
parts of sums, then on three ranks with a layout for each input (ci/keras_suite/carriers.py).

The tests are those that Keras's distributions carry. They run in the environment of ci/test.py with what they ask for
besides (ci/keras_own.txt), some files in one process, which is forked with Keras imported. A test at which a process
hangs or dies has failed, and the rest goes on in another. What fails must be named in ci/keras_own.toml, with its
reason; what is named there and passes is an error too. Of the tests at most one in a hundred may fail by limits of
unidist.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "ci" / "keras_suite"
GROUPS = ("trainers", "models", "callbacks", "losses", "metrics", "optimizers", "saving", "layers", "ops", "random")
OPERATIONS = ("ops.", "random.")
API = "distribution.distribution_lib_test"
EXPECTED = ROOT / "ci" / "keras_own.toml"
KINDS = ("plain", "package", "traces", "other", "framework", "limit", "fault")
KERAS = {"sim": "torch", "carriers": "torch", "torch": "torch", "jax": "jax", "tensorflow": "tensorflow"}
DEVICES = {"sim": 2, "jax": 2, "tensorflow": 2}
DEVICES_OF_API = {"sim": 4, "jax": 8, "tensorflow": 8}
WHOLE = (
    *(f"sim-{under}" for under in ("data", "zero3", "model")),
    *(f"{backend}-api" for backend in ("sim", "torch", "jax", "tensorflow")),
    "carriers-ops",
)
# Of what runs elsewhere this share, with --all too: each test costs two processes, or programs that are compiled.
SAMPLED = {"torch-data": 0.05, "torch-model": 0.05, "jax-data": 0.05, "tensorflow-data": 0.05}
# A sample is of a share of the files, of which all tests are collected, and of a share of the tests of these.
OF_FILES, SHARE, CHUNK, WORKERS, SECONDS = 0.15, 0.04, 12, 2, 120
# What most of Keras's tests import besides.
IMPORTED = ("pytest", "keras", "keras.src.testing", "tensorflow", "sklearn.base", "torch", "jax")
MOST_LIMITS = 0.01


@dataclass(frozen=True)
class Pass:
    """Keras's tests on one backend, under one strategy; "plain" is Keras without unidist."""

    name: str

    @property
    def backend(self) -> str:
        return self.name.partition("-")[0] if not self.is_plain else ""

    @property
    def keras(self) -> str:
        first, _, second = self.name.partition("-")
        return second if self.is_plain else KERAS[first]

    @property
    def under(self) -> str:
        return self.name.partition("-")[2]

    @property
    def is_plain(self) -> bool:
        return self.name.startswith("plain-")

    @property
    def processes(self) -> int:
        return 2 if self.backend == "torch" and self.under != "api" else 1

    @property
    def devices(self) -> int | None:
        return (DEVICES_OF_API if self.under == "api" else DEVICES).get(self.backend)

    def files(self, every: Sequence[str]) -> list[str]:
        """Those of the API and of operations have passes of their own."""
        own = {"api": (API,), "ops": (*OPERATIONS, "losses.", "metrics.")}.get(self.under)
        if own:
            return [file for file in every if file.startswith(own)]
        return [file for file in every if not file.startswith((API, *(() if self.is_plain else OPERATIONS)))]


@dataclass(frozen=True)
class Outcome:
    """What became of a test: "passed", "skipped" or "failed", the first line of why, and how many carriers it had."""

    became: str
    why: str = ""
    carriers: int = 0


@dataclass(frozen=True)
class Expected:
    """Tests that fail for a reason.

    Attributes:
        kind: one of KINDS; ci/keras_own.toml says what each is.
        tests: patterns of tests' names.
        where: patterns of the passes in which they fail, or of the Keras backends of these.
        saying: they fail so; others of them may pass.
        sometimes: they pass now and then.
    """

    kind: str
    why: str
    tests: Sequence[str]
    where: Sequence[str] = ("*",)
    saying: str = ""
    sometimes: bool = False

    def names(self, one: Pass, test: str) -> bool:
        if one.is_plain and self.kind != "plain":
            return False
        is_there = any(fnmatch.fnmatchcase(name, where) for where in self.where for name in (one.name, one.keras))
        return is_there and any(fnmatch.fnmatchcase(test, pattern) for pattern in self.tests)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("passes", nargs="*", help="whole passes; none: a sample of all")
    parser.add_argument("--all", action="store_true", help="all passes, whole")
    parser.add_argument("--only", default="", help="only the files whose names begin so")
    parser.add_argument("--keras", default="", help='"nightly", or a version; without it, the installed one')
    parser.add_argument("--share", type=float, help="of the tests of each pass that is named, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--json", type=Path, help="a file to write each test's outcome into")
    asked = parser.parse_args(arguments)
    _turn_to(_python(asked.keras))
    files = [file for file in _files() if file.startswith(asked.only)]
    is_whole = asked.all or bool(asked.passes)
    jobs = []
    for one in (Pass(name) for name in asked.passes or (*WHOLE, *SAMPLED)):
        share = asked.share or (SAMPLED.get(one.name, 1.0) if is_whole or one.under == "api" else SHARE)
        # A sample is one process: most of its time would go into starting.
        size = round(CHUNK / share) if is_whole else len(files)
        chosen = one.files(files)
        if not is_whole and share < 1.0:
            chosen = [file for file in chosen if _is_drawn(f"{asked.seed}/{one.name}/{file}", OF_FILES)]
        chunks = [chosen[start : start + size] for start in range(0, len(chosen), max(size, 1))]
        jobs += [(one, chunk, f"{asked.seed}/{share}") for chunk in chunks]
    with ThreadPoolExecutor(WORKERS) as workers:
        found = list(workers.map(lambda job: outcomes_of(*job), jobs))
    outcomes: dict[Pass, dict[str, Outcome]] = {}
    for (one, *_), became in zip(jobs, found, strict=True):
        outcomes.setdefault(one, {}).update(became)
    if asked.json:
        told = {one.name: {test: astuple(b) for test, b in found.items()} for one, found in outcomes.items()}
        asked.json.write_text(json.dumps(told, indent=1))
    expected = expectations()
    return max([_said(one, became, expected) for one, became in outcomes.items()], default=1)


def expectations() -> list[Expected]:
    tables = tomllib.loads(EXPECTED.read_text())["expected"]
    return [Expected(**table) for table in tables]


def name_of(nodeid: str) -> str:
    """A test's name: `callbacks.swap_ema_weights_test.SwapEMAWeightsTest.test_swap`."""
    path, *rest = nodeid.split("::")
    return ".".join((path.removesuffix(".py").replace("/", "."), *rest))


def is_in_sample(nodeid: str, under: str) -> bool:
    seed, _, share = os.environ["KERAS_OWN_SAMPLE"].partition("/")
    return _is_drawn(f"{seed}/{under}/{name_of(nodeid)}", float(share))


def _is_drawn(name: str, share: float) -> bool:
    return zlib.crc32(name.encode()) < share * 2**32


def _python(keras: str) -> Path:
    from ci.test import environment, layered, turn_to_optimized_python

    turn_to_optimized_python()
    packages = [line for line in (ROOT / "ci" / "keras_own.txt").read_text().splitlines() if not line.startswith("#")]
    if keras == "nightly":
        return layered(environment(), [*packages, "keras-nightly"], time.strftime("%G-%V"))
    return layered(environment(), packages + ([f"keras=={keras}"] if keras else []))


def _turn_to(python: Path) -> None:
    """Goes on in this Python."""
    from ci.test import surroundings

    if Path(sys.executable) != python:
        os.execve(python, [str(python), *sys.argv], surroundings(python, ROOT))


def _files() -> list[str]:
    """The names of Keras's files of tests, `layers.core.dense_test`: those of GROUPS and API."""
    source = _source()
    paths = [path.relative_to(source).with_suffix("") for path in source.rglob("*_test.py")]
    names = sorted(".".join(path.parts) for path in paths if path.parts[0] in GROUPS)
    if not names or not (source / f"{API.replace('.', '/')}.py").exists():
        raise SystemExit(f"{source}: this Keras carries no tests; take them from its source distribution")
    return [API, *names]


def _source() -> Path:
    found = importlib.util.find_spec("keras")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "src"


def outcomes_of(one: Pass, files: Sequence[str], sample: str) -> dict[str, Outcome]:
    """What became of the tests of some files, in as many processes as it takes: one ends where it hangs or dies."""
    outcomes: dict[str, Outcome] = {}
    while True:
        with tempfile.TemporaryDirectory(prefix="unidist-keras-") as folder:
            (Path(folder) / "done").write_text("\n".join(outcomes))
            code, said = _process(one, files, {"KERAS_OWN_FOLDER": folder, "KERAS_OWN_SAMPLE": sample})
            told = [_told(Path(folder) / f"told-{rank}.jsonl", code, said) for rank in range(one.processes)]
        before = len(outcomes)
        found = _together(told)
        is_done = found.pop("", None) is not None and all("" in rank for rank in told)
        outcomes.update(found)
        if is_done:
            return outcomes
        if len(outcomes) == before:
            last = "\n".join(said.splitlines()[-40:])
            return {**outcomes, files[0]: Outcome("failed", f"exit code {code}:\n{last}")}


def _process(one: Pass, files: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit code of a process of tests, or of its launcher, and what it said."""
    from ci.test import surroundings
    from tests.visible import QUICK_JAX
    from unidist.testing import forkserver

    source = _source()
    paths = [str(source / f"{file.replace('.', '/')}.py") for file in files]
    own = {"BACKEND": one.backend, "DEVICES": str(one.devices or ""), "UNDER": one.under}
    imported = {
        **surroundings(Path(sys.executable), ROOT),
        "KERAS_BACKEND": one.keras,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(SUITE))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMP_NUM_THREADS": "1",
        **QUICK_JAX,
    }
    environment = {**imported, **environment, **{f"KERAS_OWN_{name}": value for name, value in own.items()}}
    limit: tuple[str, ...] = (f"--timeout={SECONDS}", "--timeout-method=thread", "--continue-on-collection-errors")
    limit += ("-x",) if one.processes > 1 else ()
    pytest = ("-q", "-p", "conftest", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", *limit)
    pytest += ("-c", str(SUITE / "pytest.ini"), f"--rootdir={source}", *paths)
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        if one.is_plain or one.processes > 1:
            launcher = ("-m", "unidist", "run", "-n", str(one.processes), "--grace", "1") if not one.is_plain else ()
            command = (sys.executable, *launcher, "-m", "pytest", *pytest)
            ended = subprocess.run(command, env=environment, cwd=SUITE, stdout=said, stderr=subprocess.STDOUT)
            code = ended.returncode
        else:
            server, out = forkserver.server(imported, IMPORTED), said.fileno()
            with open(os.devnull) as nothing:
                code = server.fork(
                    "ci.keras_own:tests", environment, nothing.fileno(), out, out, arguments=pytest
                ).wait()
        said.seek(0)
        return code, said.read()


def tests(*arguments: str) -> None:
    """In a forked process."""
    import pytest

    os.chdir(SUITE)
    sys.exit(pytest.main(list(arguments)))


def _told(path: Path, code: int, said: str) -> dict[str, Outcome]:
    """What a process wrote down; a test that it began and did not end is the one that it ended at. "": all ended."""
    told: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        became = Outcome(one["became"], one.get("why", ""), one.get("carriers", 0))
        if _rank_of(became) > _rank_of(told.get(one["test"])):
            told[one["test"]] = became
    how = f"hung for {SECONDS} seconds" if "+++ Timeout +++" in said else f"ended by {code}"
    ended = Outcome("failed", f"the process {how} at it")
    return {test: ended if became.became == "begun" else became for test, became in told.items()}


def _together(told: Sequence[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """What became of tests on all ranks. Behind the first that failed on one of several, these are out of step."""
    together: dict[str, Outcome] = {}
    for test in max(told, key=len):
        together[test] = max((rank[test] for rank in told if test in rank), key=_rank_of)
        if len(told) > 1 and together[test].became == "failed":
            break
    return together


def _rank_of(became: Outcome | None) -> int:
    return 0 if became is None else ("begun", "passed", "skipped", "failed").index(became.became) + 1


def judged(
    one: Pass, outcomes: Mapping[str, Outcome], expected: Sequence[Expected]
) -> tuple[list[str], dict[str, int]]:
    """What is not as expected, and how many tests failed of each kind that is."""
    wrong, excused = [], Counter[str]()
    for test, became in sorted(outcomes.items()):
        entry = next((entry for entry in expected if entry.names(one, test) and entry.saying in became.why), None)
        if became.became == "failed" and entry is not None:
            excused[entry.kind] += 1
        elif became.became == "failed":
            wrong.append(f"FAILED: {test}: {became.why}")
        elif became.became == "passed" and entry is not None and not entry.sometimes:
            wrong.append(f"PASSES, take it out of {EXPECTED.name}: {test} ({entry.why})")
    ran = sum(became.became != "skipped" for became in outcomes.values())
    # One in any case: a sample may have drawn it.
    if excused["limit"] > max(1, math.ceil(MOST_LIMITS * ran)):
        wrong.append(f"TOO MANY LIMITS: {excused['limit']} of {ran} tests; at most {MOST_LIMITS:.0%} may be")
    if one.backend == "carriers" and not any(became.carriers for became in outcomes.values()):
        wrong.append("NO CARRIERS: none of the tests was given any")
    return wrong, dict(excused)


def _said(one: Pass, outcomes: Mapping[str, Outcome], expected: Sequence[Expected]) -> int:
    """Prints what is not as expected; 1 if anything is not."""
    wrong, excused = judged(one, outcomes, expected)
    for line in wrong:
        print(f"{one.name}: {line}")
    count = Counter(became.became for became in outcomes.values())
    why = ", ".join(f"{number} {kind}" for kind, number in sorted(excused.items()))
    ran = f"{count['passed']} of {count['passed'] + count['failed']} passed"
    if one.backend == "carriers":
        ran += f" ({sum(became.carriers > 0 for became in outcomes.values())} with carriers)"
    print(f"{one.name}: {ran}, {count['skipped']} skipped; expected to fail: {why or 'none'}", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""What the tests notice: `python3 ci/mutants.py`. By hand; two at a time, under two hours on two cores.

Each table of ci/breakages/*.toml is a small mistake that somebody could make. It is planted in a copy of the checkout,
and the tests that ought to notice are run there: they shall fail ("fell"). Where they pass ("stood") a test is missing,
and where they hang ("timed out") one would have to wait for what a test should say. The tests must pass without it.

What is known of a tree is kept under ~/.cache/unidist-ci/mutants, so a run that was interrupted goes on where it stood.

    python3 ci/mutants.py                           all that are not known yet
    python3 ci/mutants.py NAME ...                  some
    python3 ci/mutants.py --room unidist/algebra    those of files that begin so
    python3 ci/mutants.py --list                    only their names and files
    python3 ci/mutants.py --again [...]             also what is known
    python3 ci/mutants.py --passing [...]           all tests have just passed in this tree: saves half the time
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ci.test import environment, surroundings, turn_to_optimized_python  # noqa: E402 - found by the line above

TABLES = ROOT / "ci" / "breakages"
# What a result depends on, beside its own table.
SUBJECTS = ("unidist", "tests", "pyproject.toml", "ci/constraints.txt")
FELL, STOOD, LATE, ERROR = "fell", "stood", "timed out", "in error"
PYTEST = ("-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=short")
# Not UNIDIST_...: tests/conftest.py forgets those, and the launcher's processes shall inherit it.
MARK = "MUTANT_OF"
# A run may take so many times as long as the tests without the breakage, and so many seconds more.
TIMES, WAIT, UNBROKEN = 4.0, 60.0, 900.0
# What tests with a breakage may take where nobody has run them without it: a world of processes gives up behind 240.
PASSING = 400.0
Judgement = tuple[str, float, str]


@dataclass(frozen=True)
class Breakage:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Result:
    key: str
    name: str
    outcome: str
    seconds: float
    how: str


def breakages(tables: Path = TABLES) -> list[Breakage]:
    """All of ci/breakages, by file and in their order there."""
    read = (tomllib.loads(path.read_text()) for path in sorted(tables.glob("*.toml")))
    return [Breakage(**{**one, "tests": tuple(one["tests"])}) for table in read for one in table["breakage"]]


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = _asked(arguments)
    known = breakages()
    if unknown := set(asked.names) - {one.name for one in known}:
        sys.exit(f"no breakage is called {', '.join(sorted(unknown))}: --list shows them")
    chosen = [one for one in known if (not asked.names or one.name in asked.names) and one.file.startswith(asked.room)]
    if asked.list:
        for one in chosen:
            print(f"{one.name:48} {one.file}")
        return 0
    turn_to_optimized_python()
    book = Book()
    if asked.again:
        book.forget(chosen)
    try:
        Workshop(environment(), book, asked.workers, asked.passing).work(chosen)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here")
        return 130
    return report([found for one in chosen if (found := book.of(one))], len(chosen))


def _asked(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plants mistakes and says which of them the tests notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--room", default="", help="only those of files whose path begins so")
    parser.add_argument("--list", action="store_true", help="only print names and files")
    parser.add_argument("--again", action="store_true", help="forget what is known of them")
    parser.add_argument("--passing", action="store_true", help="the tests are not run without a breakage first")
    parser.add_argument("--workers", type=int, default=2, help="copies of the checkout, each with one run at a time")
    return parser.parse_args(arguments)


def report(results: list[Result], chosen: int) -> int:
    """Prints the table. 0 if all fell by a test that failed."""
    by = {outcome: [r for r in results if r.outcome == outcome] for outcome in (FELL, STOOD, LATE, ERROR)}
    print()
    for outcome, found in by.items():
        names = "" if outcome == FELL else ", ".join(r.name for r in found)
        print(f"{outcome:10} {len(found):4}  {names}".rstrip())
    print(f"{'of':10} {chosen:4}  {sum(r.seconds for r in results):.0f} seconds in all")
    return 0 if len(by[FELL]) == chosen else 1


class Book:
    """What is known of this tree: one line of JSON a result, written when it is found."""

    def __init__(self) -> None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unidist-ci" / "mutants"
        folder.mkdir(parents=True, exist_ok=True)
        content = hashlib.sha256()
        for name in files(*SUBJECTS):
            content.update(f"{name}\0{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\0".encode())
        self.path = folder / f"{content.hexdigest()[:16]}.jsonl"
        self.lock = threading.Lock()
        self.results: dict[str, Result] = {}
        if self.path.exists():
            lines = self.path.read_text().splitlines()
            self.results = {result.key: result for result in (Result(**json.loads(line)) for line in lines)}

    def of(self, subject: Breakage | tuple[str, ...]) -> Result | None:
        return self.results.get(key(subject))

    def add(self, result: Result) -> None:
        with self.lock, self.path.open("a") as file:
            self.results[result.key] = result
            print(json.dumps(asdict(result)), file=file)

    def forget(self, chosen: Iterable[Breakage]) -> None:
        gone = {key(part) for one in chosen for part in (one, one.tests)}
        self.results = {k: result for k, result in self.results.items() if k not in gone}
        self.path.write_text("".join(json.dumps(asdict(result)) + "\n" for result in self.results.values()))


def key(subject: Breakage | tuple[str, ...]) -> str:
    """Of a breakage, or of tests without one: its content, so that another table leaves its result known."""
    content: Any = asdict(subject) if isinstance(subject, Breakage) else subject
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def files(*under: str) -> list[str]:
    """What git tracks or would track."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *under)
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted({name for name in names if name and (ROOT / name).is_file()})


class Workshop:
    """Some copies of the checkout, and a thread for each."""

    def __init__(self, python: Path, book: Book, workers: int, passing: bool) -> None:
        self.python = python
        self.book = book
        self.workers = workers
        self.passing = passing
        self.copies: SimpleQueue[Path] = SimpleQueue()
        self.stop = threading.Event()
        self.stamps = count(int(time.time()))
        self.locks: dict[tuple[str, ...], threading.Lock] = {}

    def work(self, chosen: list[Breakage]) -> None:
        for one in chosen:
            if found := self.book.of(one):
                say(found, " (known)")
        if todo := [one for one in chosen if not self.book.of(one)]:
            self.look_for_tests(todo)
        todo = [one for one in todo if not self.book.of(one)]
        # The second of two breakages with the same tests waits until these are known to pass.
        self.locks = {one.tests: threading.Lock() for one in todo}
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(self.workers) as pool:
            for number in range(min(self.workers, len(todo))):
                self.copies.put(copy(Path(folder) / str(number)))
            try:
                for done in [pool.submit(self.try_out, one) for one in todo]:
                    done.result()
            finally:
                self.stop.set()

    def look_for_tests(self, todo: list[Breakage]) -> None:
        """Before anything is planted: matrices of cases are sampled, so that a named case may not be there any more."""
        paths = sorted({path for one in todo for name in one.tests if (ROOT / (path := name.split("::")[0])).exists()})
        command = [str(self.python), *PYTEST, "--maxfail=0", "--collect-only", *paths]
        output = subprocess.run(command, cwd=ROOT, env=surroundings(self.python, ROOT), capture_output=True, text=True)
        there = set()
        for case in output.stdout.splitlines():
            parts = case.partition("[")[0].split("::")
            there |= {case, *("::".join(parts[:length]) for length in range(1, len(parts) + 1))}
        for one in todo:
            if missing := [name for name in one.tests if name not in there]:
                result = Result(key(one), one.name, ERROR, 0.0, f"not there: {' '.join(missing)}")
                self.book.add(result)
                say(result)

    def try_out(self, one: Breakage) -> None:
        if self.stop.is_set():
            return
        at = self.copies.get()
        try:
            with self.locks[one.tests]:
                whole = None if self.passing else self.book.of(one.tests) or self.without(one.tests, at)
            if whole is None or whole.outcome == STOOD:
                limit = PASSING if whole is None else WAIT + TIMES * whole.seconds
                outcome, seconds, how = self.planted(one, at, limit)
            else:
                outcome, seconds, how = ERROR, 0.0, f"its tests fail without it: {whole.how}"
            result = Result(key(one), one.name, outcome, seconds, how)
            if not self.stop.is_set():
                self.book.add(result)
                say(result)
        finally:
            self.copies.put(at)

    def without(self, tests: tuple[str, ...], at: Path) -> Result:
        result = Result(key(tests), " ".join(tests), *self.run(tests, at, UNBROKEN))
        if not self.stop.is_set():
            self.book.add(result)
        return result

    def planted(self, one: Breakage, at: Path, limit: float) -> Judgement:
        path = at / one.file
        whole = path.read_text() if path.is_file() else ""
        if whole.count(one.old) != 1:
            return ERROR, 0.0, f"`old` occurs {whole.count(one.old)} times in {one.file}, not once"
        self.write(path, whole.replace(one.old, one.new))
        try:
            return self.run(one.tests, at, limit, one.file)
        finally:
            self.write(path, whole)

    def write(self, path: Path, text: str) -> None:
        """With a time of its own: Python takes compiled code for this text's by time, in seconds, and length."""
        path.write_text(text)
        stamp = next(self.stamps)
        os.utime(path, (stamp, stamp))

    def run(self, tests: tuple[str, ...], at: Path, limit: float, broken: str = "") -> Judgement:
        """Outcome, seconds, and what pytest says of the first test that failed."""
        mark = uuid.uuid4().hex
        environ = surroundings(self.python, at) | {MARK: mark}
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            pytest = subprocess.Popen(
                (self.python, *PYTEST, *tests),
                cwd=at,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while pytest.poll() is None and time.monotonic() - began < limit and not self.stop.is_set():
                    time.sleep(0.05)
                code = pytest.poll()
            finally:
                end(pytest, mark)
            output.seek(0)
            text = output.read()
        return judged(code, time.monotonic() - began, text, broken)


def judged(code: int | None, seconds: float, text: str, broken: str) -> Judgement:
    lines = text.splitlines()
    # pytest-timeout ends a hanging pytest by itself, with the exit code of a failure.
    if code is None or any("+ Timeout +" in line for line in lines):
        return LATE, seconds, "no end in sight"
    if code == 0:
        return STOOD, seconds, ""
    how = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1] if lines else "")
    if code == 1:
        return FELL, seconds, how
    if code < 0:
        return FELL, seconds, f"by {signal.Signals(-code).name}"
    # The tests pass without it, so what cannot be imported now cannot for its sake, if the file is named at all.
    if broken and broken in text and ("ERROR collecting" in text or "while loading conftest" in text):
        return FELL, seconds, f"at import: {how}"
    return ERROR, seconds, f"pytest ended with {code}: {how}"


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kills the tests and all that they started, in sessions of their own too: their environments are marked."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10.0
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def copy(to: Path) -> Path:
    for name in files():
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return to


def say(result: Result, note: str = "") -> None:
    how = result.how if len(result.how) <= 150 else result.how[:147] + "..."
    print(f"{result.outcome:9} {result.seconds:6.1f} s  {result.name}{note}  {how}".rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The table of faults: each happens to a real training, which must end with the numbers of an undisturbed one.

    python3 ci/test.py --python; PYTHON ci/faults.py                      # all cells: hours
    PYTHON ci/faults.py --results FILE --jobs 2                           # and goes on where it was stopped
    PYTHON ci/faults.py --sample 20 --seed 3                              # some
    PYTHON ci/faults.py --backend torch --world 2 --fault SIGKILL         # those

Prints one line a cell, with the seconds that it took, and the table at the end. With `--results` each cell's outcome is
kept, and the cells that are right there are not run again: the table is of all that the file has. With `--jobs` several
run at the same time, and wait for cores: those that are not right are run again by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.hiding import FROM_PROGRAMS, HIDDEN  # noqa: E402
from tests.support.hosts import why_not  # noqa: E402
from tests.surviving.cells import Outcome, run, undisturbed  # noqa: E402
from tests.surviving.table import BACKENDS, PLACES, WORLDS, Cell, cells, sample  # noqa: E402
from unidist.tables import table  # noqa: E402


def chosen(asked: argparse.Namespace) -> list[Cell]:
    if asked.sample:
        return sample(asked.sample, asked.seed)
    names = ("backend", "world", "fault", "place")
    those = [cell for cell in cells() if cell.in_memory or not asked.in_memory]
    return [cell for cell in those if all(getattr(asked, n) in (None, getattr(cell, n)) for n in names)]


def outcomes_of(wanted: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, Outcome]]:
    """Of each cell, as they end; those that fail beside others are run by themselves, once more."""
    for reference in dict.fromkeys((cell.backend, cell.world, cell.dropout) for cell in wanted):
        undisturbed(*reference)
    with ThreadPoolExecutor(jobs) as pool:
        again = []
        running = {pool.submit(alone, cell): cell for cell in wanted}
        for done in as_completed(running):
            if jobs > 1 and done.result().wrong:
                again.append(running[done])
                print(f"        {running[done]}: again, later: {'; '.join(done.result().wrong)}", flush=True)
            else:
                yield running[done], done.result()
    yield from ((cell, alone(cell)) for cell in again)


def alone(cell: Cell) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return run(cell, Path(folder))


# what was found -------------------------------------------------------------------------------------------------------


def show(outcomes: dict[Cell, Outcome]) -> None:
    """One table a backend: a fault a row, a place a column; in each field the worlds in which it held, or did not."""
    for backend in BACKENDS:
        known = {cell: outcome for cell, outcome in outcomes.items() if cell.backend == backend}
        places = _places(known)
        rows = [("", *places)]
        for fault in dict.fromkeys(cell.fault for cell in known):
            rows.append((fault, *(_field(known, fault, place) for place in places)))
        if known:
            print(f"\n{backend}\n{table(rows)}")
    print(f"\nseconds from the fault to the launcher's line, all processes ended\n{table(_seconds(outcomes))}")


def show_pages(outcomes: dict[Cell, Outcome]) -> None:
    """Tables of Markdown: how many cells are right, over all backends and worlds; and the seconds."""
    places = _places(outcomes)
    rows = [("", *places)]
    for fault in dict.fromkeys(cell.fault for cell in outcomes):
        found = [[one for cell, one in outcomes.items() if (cell.fault, cell.place) == (fault, at)] for at in places]
        rows.append((fault, *(_right(ones) if ones else "" for ones in found)))
    _show_page(rows)
    _show_page(_seconds(outcomes))


def _places(outcomes: dict[Cell, Outcome]) -> list[str]:
    found = {cell.place for cell in outcomes}
    return [place for place in (*PLACES, "data", "copying") if place in found]


def _right(found: Sequence[Outcome]) -> str:
    right = sum(not one.wrong for one in found)
    return str(right) if right == len(found) else f"{right} of {len(found)}"


def _show_page(rows: Sequence[Sequence[str]]) -> None:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    print("\n".join(["", lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]))


def _seconds(outcomes: dict[Cell, Outcome]) -> list[tuple[str, ...]]:
    rows = [("", *BACKENDS)]
    for fault in dict.fromkeys(cell.fault for cell in outcomes):
        row = [_noticed(outcomes, fault, backend) for backend in BACKENDS]
        if any(row):
            rows.append((fault, *row))
    return rows


def _field(known: dict[Cell, Outcome], fault: str, place: str) -> str:
    found = {
        f"{cell.world}{' in memory' if cell.in_memory else ''}": outcome
        for cell, outcome in known.items()
        if (cell.fault, cell.place) == (fault, place)
    }
    worlds = (f"{world}{where}" for world in WORLDS for where in ("", " in memory"))
    return ", ".join(world if not found[world].wrong else f"{world}:FAILED" for world in worlds if world in found)


def _noticed(outcomes: dict[Cell, Outcome], fault: str, backend: str) -> str:
    found = [one.noticed for cell, one in outcomes.items() if (cell.fault, cell.backend) == (fault, backend)]
    seconds = [one for one in found if one is not None]
    return f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}" if seconds else ""


# kept -----------------------------------------------------------------------------------------------------------------


def kept(path: Path | None) -> dict[Cell, Outcome]:
    """What a file of results has: the last outcome of each cell."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    found = [json.loads(line) for line in lines]
    return {Cell(**one["cell"]): Outcome(**one["outcome"]) for one in found}


def keep(path: Path | None, cell: Cell, outcome: Outcome) -> None:
    if path is not None:
        with path.open("a") as file:
            print(json.dumps({"cell": asdict(cell), "outcome": {**asdict(outcome), "lines": []}}), file=file)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("backend", "world", "fault", "place"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--in-memory", action="store_true", help="only trainings that go on from their nodes' memory")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time")
    parser.add_argument("--results", type=Path, help="a file of outcomes: read, and written on")
    parser.add_argument("--pages", action="store_true", help="prints tables of Markdown")
    asked = parser.parse_args(arguments)
    # As the tests' programs are started: Keras finds only the framework that it runs on.
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / folder) for folder in (*HIDDEN.values(), *FROM_PROGRAMS))
    wanted = chosen(asked)
    if missing := why_not():
        print(f"no two hosts: {missing}")
        wanted = [cell for cell in wanted if cell.world != "two hosts"]
    outcomes = kept(asked.results)
    wanted = [cell for cell in wanted if cell not in outcomes or outcomes[cell].wrong]
    print(f"{len(wanted)} cells, seed {asked.seed}; {len(outcomes)} are known", flush=True)
    for cell, outcome in outcomes_of(wanted, asked.jobs):
        outcomes[cell] = outcome
        keep(asked.results, cell, outcome)
        noticed = f", {outcome.noticed:.1f} s until it was named" if outcome.noticed is not None else ""
        print(f"{outcome.seconds:5.1f} s  {cell}: {'; '.join(outcome.wrong) or 'right'}{noticed}", flush=True)
        if outcome.wrong:
            print("\n".join(f"        {line}" for line in outcome.lines[-40:]), flush=True)
    (show_pages if asked.pages else show)(outcomes)
    failed = sum(bool(outcome.wrong) for outcome in outcomes.values())
    print(f"\n{len(outcomes) - failed} of {len(outcomes)} cells are right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The table of faults: each happens to a real training, which must end with the numbers of an undisturbed one.

    python3 ci/test.py --python; PYTHON ci/faults.py                      # all cells: hours
    PYTHON ci/faults.py --sample 20 --seed 3                              # some
    PYTHON ci/faults.py --backend torch --world 2 --fault SIGKILL         # those

Prints one line a cell, with the seconds that it took, and the table at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.hiding import FROM_PROGRAMS, HIDDEN  # noqa: E402
from tests.support.hosts import why_not  # noqa: E402
from tests.surviving.cells import BACKENDS, PLACES, WORLDS, Cell, Outcome, cells, run, sample  # noqa: E402
from unidist.tables import table  # noqa: E402


def chosen(asked: argparse.Namespace) -> list[Cell]:
    if asked.sample:
        return sample(asked.sample, asked.seed)
    names = ("backend", "world", "fault", "place")
    those = [cell for cell in cells() if cell.in_memory or not asked.in_memory]
    return [cell for cell in those if all(getattr(asked, n) in (None, getattr(cell, n)) for n in names)]


def show(outcomes: dict[Cell, Outcome]) -> None:
    """One table a backend: a fault a row, a place a column; in each field the worlds in which it held, or did not."""
    for backend in BACKENDS:
        known = {cell: outcome for cell, outcome in outcomes.items() if cell.backend == backend}
        places = [place for place in (*PLACES, "data", "copying") if any(cell.place == place for cell in known)]
        rows = [("", *places)]
        for fault in dict.fromkeys(cell.fault for cell in known):
            rows.append((fault, *(_field(known, fault, place) for place in places)))
        if known:
            print(f"\n{backend}\n{table(rows)}")


def _field(known: dict[Cell, Outcome], fault: str, place: str) -> str:
    found = {
        f"{cell.world}{' in memory' if cell.in_memory else ''}": outcome
        for cell, outcome in known.items()
        if (cell.fault, cell.place) == (fault, place)
    }
    worlds = (f"{world}{where}" for world in WORLDS for where in ("", " in memory"))
    return ", ".join(world if not found[world].wrong else f"{world}:FAILED" for world in worlds if world in found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("backend", "world", "fault", "place"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--in-memory", action="store_true", help="only trainings that go on from their nodes' memory")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args(arguments)
    # As the tests' programs are started: Keras finds only the framework that it runs on.
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / folder) for folder in (*HIDDEN.values(), *FROM_PROGRAMS))
    wanted = chosen(asked)
    if missing := why_not():
        print(f"no two hosts: {missing}")
        wanted = [cell for cell in wanted if cell.world != "two hosts"]
    print(f"{len(wanted)} cells, seed {asked.seed}", flush=True)
    outcomes: dict[Cell, Outcome] = {}
    for cell in wanted:
        with tempfile.TemporaryDirectory() as folder:
            outcomes[cell] = outcome = run(cell, Path(folder))
        print(f"{outcome.seconds:5.1f} s  {cell}: {'; '.join(outcome.wrong) or 'right'}", flush=True)
        if outcome.wrong:
            print("\n".join(f"        {line}" for line in outcome.lines[-40:]), flush=True)
    show(outcomes)
    failed = sum(bool(outcome.wrong) for outcome in outcomes.values())
    print(f"\n{len(outcomes) - failed} of {len(outcomes)} cells are right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

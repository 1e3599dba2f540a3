"""What the record of a process costs (unidist.flight). Run by hand:

    unidist run -n 2 benchmarks/recording.py

Nanoseconds of a note, and whether it keeps memory. Then `fit` of a small Keras model, data parallel over two gloo
processes, with the notes of steps, phases and collectives, and with each of them replaced by nothing, in turns. The
thread that gives signs of life runs in both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import timeit
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unidist

unidist.use("torch")

import keras  # noqa: E402
from paired import report, seconds  # noqa: E402

from unidist.backends.torch.calls import Calls  # noqa: E402
from unidist.flight.recorder import Recorder, recorder  # noqa: E402

ROWS, FEATURES, WIDTH = 32, 64, 64
NOTES = ("begin", "start", "go_on", "wait", "end", "enter", "back", "stepped")
CALLS = 20_000


def told(name: str, call: Callable[[], object]) -> float:
    """The median of its nanoseconds."""
    found = sorted(taken / CALLS * 1e9 for taken in timeit.repeat(call, number=CALLS, repeat=25))
    middle = statistics.median(found)
    print(f"  {name:32s} {middle:6.0f} ns (least {found[0]:.0f}, most {found[-1]:.0f})")
    return middle


def notes(folder: Path) -> tuple[float, float]:
    """Nanoseconds of the notes of a collective that is started and waited for, and of a step, in a file."""
    recorder = Recorder()
    recorder.open(folder, 0, 1)
    calls, purpose, kind = Calls(), "gradient", recorder.kind("a benchmark")
    _, kinds = calls.begin(("all_reduce", (16, 8), torch.float32))
    kinds[purpose] = kind

    def collective() -> None:
        recorder.end(recorder.begin(kinds[purpose]))

    def under_way() -> None:
        number = recorder.begin(kinds[purpose])
        recorder.go_on(number)
        recorder.wait(number)
        recorder.end(number)

    def step() -> None:
        recorder.enter("step")
        recorder.stepped()
        recorder.enter("program")
        recorder.enter("data")

    print("a note")
    told("nothing, called", lambda: None)
    told("collective", collective)
    found = told("collective, under way", under_way), told("step, with its phases", step)
    threads = threading.active_count()
    tracemalloc.start()
    collective()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(CALLS):
        collective()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    recorder.close()
    print(f"  memory kept by {CALLS} notes: {kept} bytes; threads started: {threading.active_count() - threads}")
    return found


def without_notes(run: Callable[[], None]) -> Callable[[], None]:
    def quiet() -> None:
        for name in NOTES:
            setattr(recorder, name, lambda *arguments, **options: 0)
        try:
            run()
        finally:
            for name in NOTES:
                delattr(recorder, name)

    return quiet


def begun_in(run: Callable[[], None]) -> int:
    """How many entries a fit makes."""
    before = recorder.begin(recorder.kind("counting"))
    run()
    return recorder.begin(recorder.kind("counting")) - before - 1


def fitting(steps: int) -> Callable[[], None]:
    keras.utils.set_random_seed(0)
    layers: Any = keras.layers
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(WIDTH, activation="relu"), layers.Dense(1)])
        model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS * steps, FEATURES)).astype("float32")
    y = rng.normal(size=(ROWS * steps, 1)).astype("float32")
    return lambda: model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps of one turn")
    parser.add_argument("--repetitions", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    is_first = unidist.process_index() == 0
    cost = 0.0, 0.0
    if is_first:
        with tempfile.TemporaryDirectory() as folder:
            cost = notes(Path(folder))
    run = fitting(options.steps)
    run()
    each = begun_in(run) / options.steps
    candidates = {"with notes": run, "without": without_notes(run)}
    times = seconds(candidates, options.repetitions, meet=unidist.barrier)
    if is_first:
        bounds = {("with notes", "without"): 1.01}
        print(f"a step makes {each:.1f} entries: its notes take {(each * cost[0] + cost[1]) / 1000:.1f} us at most")
        report(f"fit, {unidist.process_count()} processes, {ROWS} rows", times, options.steps, bounds)


if __name__ == "__main__":
    main()

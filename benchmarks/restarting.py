"""How long a training stands still when a process of it is killed: `unidist run -n 2 --max-restarts 1`.

    python benchmarks/restarting.py [BACKEND ...] [--without]

A small Keras model trains with unidist.Checkpoint(every=5); rank 1 gets SIGKILL after a step. A line for each backend,
with processes that are forked from what was imported beforehand, and with `--without` also with new ones:

    seconds from the kill to   the launcher's line   the program's first line   the first step
    beside them                seconds of the imports in the first attempt, and in the restart

The kill comes when the launcher has imported (where it does). What other programs do on the machine shows in all
figures alike: compare those of one line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

PROGRAM = """
import time
began = time.monotonic()
import os, pathlib, signal, sys
import unidist
name = os.environ["UNIDIST_BACKEND"]
unidist.use(name)
joined = time.monotonic()
import keras, numpy as np
imported = time.monotonic()
rank, restarts = unidist.process_index(), int(os.environ["UNIDIST_RESTARTS"])
strategy = unidist.DataParallel()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
drawn = np.random.default_rng(0)
x, y = drawn.normal(size=(256, 8)).astype("float32"), drawn.normal(size=(256, 1)).astype("float32")

class Fault(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 1 and rank == 0:
            print("TIMES", restarts, began, imported, time.monotonic(), flush=True)
        if self.steps == 12 and rank == 1 and not restarts:
            told, limit = pathlib.Path(os.environ["UNIDIST_FLIGHT"], "rank-0.told"), time.monotonic() + 300
            while "wait" in sys.argv and not told.exists() and time.monotonic() < limit: time.sleep(0.001)
            while "wait" in sys.argv and told.exists() and time.monotonic() < limit: time.sleep(0.001)
            print("KILLED", time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[Fault(), unidist.Checkpoint("checkpoints", every=5)])
"""
# As `unidist run`, but that nothing is preloaded.
WITHOUT = """
import sys
from unidist import cli
from unidist.launch.preloading import Preloading
Preloading.look = lambda *_: None
sys.exit(cli.main(["run", *sys.argv[1:]]))
"""


@dataclass
class Seen:
    """Seconds of the machine's monotonic clock."""

    killed: float = 0.0
    detected: float = 0.0
    began: dict[int, float] = field(default_factory=dict)
    imported: dict[int, float] = field(default_factory=dict)
    stepped: dict[int, float] = field(default_factory=dict)
    how: str = "new"


def measured(backend: str, preloads: bool) -> Seen:
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(PROGRAM)
        launcher = ["-m", "unidist", "run"] if preloads else ["-c", WITHOUT]
        given = ["-n", "2", "--backend", backend, "--max-restarts", "1", "train.py", *(["wait"] if preloads else [])]
        environ = {**os.environ, "UNIDIST_LOG": "info", "TF_CPP_MIN_LOG_LEVEL": "3"}
        with subprocess.Popen(
            [sys.executable, *launcher, *given],
            **{"cwd": folder, "env": environ, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
        ) as process:
            said = []
            for line in process.stdout or ():
                said.append(line)
                _note(line.split(), seen)
    if process.returncode or 1 not in seen.stepped:
        raise SystemExit("".join(said))
    return seen


def _note(words: list[str], seen: Seen) -> None:
    if words[:2] == ["unidist:", "restart"]:
        seen.detected = time.monotonic()
    elif "fork its processes" in " ".join(words):
        seen.how = "forked"
    elif words[1:2] == ["KILLED"]:
        seen.killed = float(words[2])
    elif words[1:2] == ["TIMES"]:
        attempt, began, imported, stepped = int(words[2]), *map(float, words[3:6])
        seen.began[attempt], seen.imported[attempt], seen.stepped[attempt] = began, imported, stepped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=["torch", "jax", "tensorflow", "horovod"])
    parser.add_argument("--without", action="store_true", help="measure new processes too")
    parsed = parser.parse_args()
    print(f"{'backend':<12}{'processes':<10}{'line':>7}{'begins':>8}{'step':>7}   imports: first{'restart':>9}")
    for backend in parsed.backends:
        for preloads in (True, False) if parsed.without else (True,):
            seen = measured(backend, preloads)
            after = [at - seen.killed for at in (seen.detected, seen.began[1], seen.stepped[1])]
            first, again = (seen.imported[attempt] - seen.began[attempt] for attempt in (0, 1))
            print(
                f"{backend:<12}{seen.how:<10}{after[0]:7.2f}{after[1]:8.2f}{after[2]:7.2f}{first:17.2f}{again:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

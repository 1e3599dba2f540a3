"""A long run: processes are killed again and again, or nothing happens for long. It ends right, and holds no more.

    python benchmarks/soak.py kills [BACKEND] [--kills 100] [--seed 1]
    python benchmarks/soak.py steps [BACKEND] [--steps 2000] [--fits 50]

`kills`: one `unidist run -n 2` of a small model with dropout, Adam and shuffled data. One of its processes, drawn by
lot, gets SIGKILL at a moment drawn by lot, every fifth time before the training goes on again. The weights at the end
are compared with those of a run to which nothing happened.

`steps`: memory, open files and threads of each process after every tenth of the steps and of the fits; their slopes.
Those of the first tenth do not count: caches fill.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from unidist.flight.reading import Flight, read_all
from unidist.launch.stalls import state_of

STEPS_OF_AN_EPOCH, BATCH, EVERY = 100, 16, 5


# what each process does -----------------------------------------------------------------------------------------------


def train(folder: Path, epochs: int, pause: float) -> None:
    model, x, y = _made()
    keras, checkpoint = _keras(), _unidist().Checkpoint(folder / "checkpoints", every=EVERY)
    slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(pause))
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[slow, checkpoint])
    values = [np.asarray(keras.ops.convert_to_numpy(v)).ravel() for v in model.trainable_variables]
    if _unidist().process_index() == 0:
        np.save(folder / "weights.npy", np.concatenate(values))


def go_on(folder: Path, steps: int, fits: int) -> None:
    keras, unidist = _keras(), _unidist()
    model, x, y = _made()
    held: list[tuple[str, int, tuple[int, int, int]]] = []
    looked_at = max(1, steps // 10)

    class Look(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        made = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.made += 1
            if self.made % looked_at == 0:
                held.append(("steps", self.made, _held()))

    callbacks = [Look(), unidist.Checkpoint(folder / "steps", every=50)]
    model.fit(x, y, batch_size=BATCH, epochs=-(-steps // STEPS_OF_AN_EPOCH), verbose=0, callbacks=callbacks)
    for number in range(fits):
        unidist_checkpoint = unidist.Checkpoint(folder / f"fit-{number}", every=2, keep=1)
        model.fit(x[: 4 * BATCH], y[: 4 * BATCH], batch_size=BATCH, verbose=0, callbacks=[unidist_checkpoint])
        if (number + 1) % max(1, fits // 10) == 0:
            held.append(("fits", number + 1, _held()))
    for kind in ("steps", "fits"):
        found = [(number, what) for one, number, what in held if one == kind][1:]
        numbers = np.array([number for number, _ in found], float)
        slopes = np.polyfit(numbers, np.array([what for _, what in found], float), 1)[0]
        first, last = found[0][1], found[-1][1]
        print(
            f"rank {unidist.process_index()}, {kind} {found[0][0]} to {found[-1][0]}: memory {slopes[0]:+.2f} KiB each "
            f"({first[0]} -> {last[0]} KiB), files {first[1]} -> {last[1]}, threads {first[2]} -> {last[2]}",
            flush=True,
        )


def _unidist() -> Any:
    import unidist

    return unidist


def _keras() -> Any:
    import keras

    return keras


def _made() -> tuple[Any, Any, Any]:
    unidist, backend = _unidist(), os.environ["UNIDIST_BACKEND"]
    unidist.use(backend, framework="torch") if backend == "horovod" else unidist.use(backend)
    keras = _keras()
    keras.utils.set_random_seed(3)
    with unidist.DataParallel().scope():
        layers = [keras.layers.Dense(32, activation="tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(STEPS_OF_AN_EPOCH * BATCH, 8)).astype("float32")
    return model, x, x.sum(1, keepdims=True)


def _held() -> tuple[int, int, int]:
    """(KiB of memory, open files, threads) of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]), len(os.listdir("/proc/self/fd")), threading.active_count()


# who watches ----------------------------------------------------------------------------------------------------------


def start(backend: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "unidist", "run", "-n", "2", "--backend", backend, "--max-restarts", "100000"]
    command += ["--timeout", "60", "--log-dir", str(folder / "logs"), __file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder / "said").open("wb"))


def kills(backend: str, count: int, seed: int) -> int:
    """0: the weights are those of a run to which nothing happened."""
    draw = random.Random(seed)
    # Enough steps that all kills fall into the training, which makes some between two of them.
    epochs = max(4, count * 60 // STEPS_OF_AN_EPOCH)
    with tempfile.TemporaryDirectory() as name:
        calm, wild = Path(name, "calm"), Path(name, "wild")
        for folder in (calm, wild):
            folder.mkdir()
        begun = time.monotonic()
        if start(backend, calm, "train", str(calm), str(epochs), "0.0").wait():
            print((calm / "said").read_text())
            return 1
        print(
            f"{backend}: {epochs * STEPS_OF_AN_EPOCH} steps undisturbed: {time.monotonic() - begun:.0f} s", flush=True
        )
        begun = time.monotonic()
        run = start(backend, wild, "train", str(wild), str(epochs), "0.005")
        killed = 0
        while run.poll() is None:
            if killed < count and _kill_one(run, wild / "logs", draw, killed):
                killed += 1
            time.sleep(0.02)
        lines = (wild / "said").read_text().splitlines()
        restarts = sum(" restart " in line for line in lines if line.startswith("unidist:"))
        if run.returncode:
            print("\n".join(lines[-60:]))
            return 1
        apart = float(np.abs(np.load(calm / "weights.npy") - np.load(wild / "weights.npy")).max())
        print(f"{killed} kills, {restarts} restarts, {time.monotonic() - begun:.0f} s; weights differ by {apart:.1e}")
        print(next(line for line in lines if "goodput" in line))
        return int(apart > 1e-6 or killed < count)


def _kill_one(run: subprocess.Popen[bytes], logs: Path, draw: random.Random, killed: int) -> bool:
    """Waits for a moment, and kills. Whether there was somebody to kill."""
    attempts = sorted(logs.glob("attempt-*"), key=lambda path: int(path.name.split("-")[1]))
    before = max((_progress(read_all(one)) for one in attempts[:-1]), default=0)
    early = killed % 5 == 4
    while run.poll() is None:
        flights = read_all(attempts[-1]) if attempts else {}
        ready = len(flights) == 2 and (early or _progress(flights) > before)
        if ready:
            time.sleep(draw.random() * (0.3 if early else 1.0))
            pid = flights[draw.randrange(2)].pid
            if pid and state_of(pid) not in ("", psutil.STATUS_ZOMBIE):
                os.kill(pid, signal.SIGKILL)
                _wait_for_the_next(run, logs, attempts[-1])
                return True
        time.sleep(0.02)
        attempts = sorted(logs.glob("attempt-*"), key=lambda path: int(path.name.split("-")[1]))
    return False


def _wait_for_the_next(run: subprocess.Popen[bytes], logs: Path, attempt: Path) -> None:
    following = logs / f"attempt-{int(attempt.name.split('-')[1]) + 1}"
    while run.poll() is None and not following.exists():
        time.sleep(0.02)


def _progress(flights: dict[int, Flight]) -> int:
    return max((flight.progress for flight in flights.values()), default=0)


def steps(backend: str, count: int, fits: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        run = start(backend, Path(name), "go-on", name, str(count), str(fits))
        code = run.wait()
        for path in sorted(Path(name, "logs").glob("attempt-0/rank-*.out")):
            print(path.read_text(), end="")
        if code:
            print(Path(name, "said").read_text())
        return code


def main() -> int:
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
        return 0
    if sys.argv[1:2] == ["go-on"]:
        go_on(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "steps"])
    parser.add_argument("backend", nargs="?", default="torch")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--fits", type=int, default=50)
    asked = parser.parse_args()
    if asked.what == "kills":
        return kills(asked.backend, asked.kills, asked.seed)
    return steps(asked.backend, asked.steps, asked.fits)


if __name__ == "__main__":
    sys.exit(main())

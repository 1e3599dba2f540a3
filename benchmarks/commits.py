"""This checkout's package against that of an earlier commit: the same trainings by `fit`, in turns.

    python benchmarks/commits.py COMMIT [--rounds 12] [--only torch]

Both packages run the same program: a perceptron of 784-1024-1024-10 with SGD and momentum, or a small transformer with
Adam where layouts are found. The processes of both stay, and each round is one epoch of either. Then fresh processes
import the package, in turns. Prints medians of paired ratios and their geometric mean; times depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE, EARLIER = "this checkout", "earlier"
MEAN, EACH = 1.00, 1.02
STEPS = 20
POLL = 0.002  # seconds
IMPORTS = 15


@dataclass(frozen=True)
class Setting:
    """What is trained where.

    Attributes:
        processes: of `unidist run`; 1: none is launched, and `devices` are of one process.
        rows: of a batch of all devices.
    """

    backend: str
    keras: str
    strategy: str
    processes: int = 1
    devices: int = 2
    rows: int = 256
    compiled: bool = False


SETTINGS = {
    "torch, data parallel": Setting("torch", "torch", "data", processes=2),
    "torch, compiled": Setting("torch", "torch", "data", processes=2, compiled=True),
    "torch, zero=3": Setting("torch", "torch", "zero3", processes=2),
    "torch, found layouts": Setting("torch", "torch", "auto", processes=2, rows=8),
    "horovod": Setting("horovod", "torch", "data", processes=2),
    "sim, data parallel": Setting("sim", "torch", "data", devices=4),
    "sim, found layouts": Setting("sim", "torch", "auto", rows=8),
    "jax, data parallel": Setting("jax", "jax", "data", devices=4),
    "jax, zero=3": Setting("jax", "jax", "zero3", devices=4),
    "tensorflow, data parallel": Setting("tensorflow", "tensorflow", "data"),
}


# the program of both --------------------------------------------------------------------------------------------------


def subject(setting: Setting, folder: Path) -> None:
    """Trains an epoch at each turn, and leaves how long it took."""
    import unidist

    unidist.use(setting.backend, **({"devices": setting.devices} if setting.processes == 1 else {}))
    epoch = _training(setting)
    epoch()
    epoch()
    is_first = unidist.process_index() == 0
    if is_first:
        (folder / "ready").touch()
    turn = 0
    while _comes(folder, turn):
        began = time.perf_counter()
        epoch()
        if is_first:
            _written(folder / f"took-{turn}", repr(time.perf_counter() - began))
        turn += 1


def _comes(folder: Path, turn: int) -> bool:
    while not (folder / f"turn-{turn}").exists():
        if (folder / "end").exists():
            return False
        time.sleep(POLL)
    return True


def _training(setting: Setting) -> Callable[[], Any]:
    import keras
    import numpy as np

    import unidist

    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rng = np.random.default_rng(0)
    count = STEPS * setting.rows
    compiled = setting.compiled or "auto"  # on torch as they are, else as programs
    if setting.strategy == "auto":
        mesh = unidist.Mesh({"model": 2})
        with unidist.ModelParallel(mesh, "auto").scope():
            model, x = _transformer(keras), rng.integers(0, 1024, (count, 64)).astype("int32")
            model.compile(keras.optimizers.Adam(1e-4), loss=loss, jit_compile=compiled)
    else:
        with unidist.DataParallel(zero=3 if setting.strategy == "zero3" else 0).scope():
            hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(2)]
            model = keras.Sequential([keras.layers.Input((784,)), *hidden, keras.layers.Dense(10)])
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=loss, jit_compile=compiled)
        x = rng.normal(size=(count, 784)).astype("float32")
    y = rng.integers(0, 10, count).astype("int32")
    return lambda: model.fit(x, y, batch_size=setting.rows, shuffle=False, verbose=0)


def _transformer(keras: Any) -> Any:
    tokens = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(1024, 128)(tokens)
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 32)(y, y)
        y = keras.layers.Dense(512, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(128)(y)
    return keras.Model(tokens, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x)))


# taking turns ---------------------------------------------------------------------------------------------------------


def seconds(name: str, setting: Setting, trees: Mapping[str, Path], rounds: int) -> dict[str, list[float]]:
    """Seconds of an epoch of each package in each round."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        folders = {which: Path(folder) / str(number) for number, which in enumerate(trees)}
        running = {which: stack.enter_context(_running(name, setting, trees[which], folders[which])) for which in trees}
        found: dict[str, list[float]] = {which: [] for which in trees}
        for which in trees:
            _awaited(folders[which] / "ready", running[which])
        for turn in range(rounds):
            for which in list(trees)[:: 1 if turn % 2 else -1]:
                _written(folders[which] / f"turn-{turn}", "")
                found[which].append(float(_awaited(folders[which] / f"took-{turn}", running[which])))
        return found


@contextlib.contextmanager
def _running(name: str, setting: Setting, tree: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir()
    launched = ["-m", "unidist", "run", "--backend", setting.backend, "-n", str(setting.processes)]
    command = [sys.executable, *(launched if setting.processes > 1 else []), __file__, "--subject", name, str(folder)]
    own = {"PYTHONPATH": str(tree), "KERAS_BACKEND": setting.keras, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, env={**os.environ, **own}, cwd=folder, stdout=output, stderr=output)
        try:
            yield process
        finally:
            (folder / "end").touch()
            process.wait(120)


def _awaited(path: Path, process: subprocess.Popen[bytes]) -> str:
    while not path.exists():
        if process.poll() is not None:
            sys.exit(
                f"the program has ended with {process.returncode}:\n{(path.parent / 'output').read_text()[-3000:]}"
            )
        time.sleep(POLL)
    return path.read_text()


def _written(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def importing(trees: Mapping[str, Path]) -> dict[str, list[float]]:
    """Seconds of `import unidist` in fresh processes."""
    found: dict[str, list[float]] = {which: [] for which in trees}
    for turn in range(IMPORTS + 1):
        for which, tree in trees.items():
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", "import unidist"], env={**os.environ, "PYTHONPATH": str(tree)}, check=True
            )
            if turn:
                found[which].append(time.perf_counter() - began)
    return found


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "unidist"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD", help="the earlier one")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="settings whose names begin so")
    parser.add_argument("--subject", nargs=2, metavar=("SETTING", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.subject:
        subject(SETTINGS[arguments.subject[0]], Path(arguments.subject[1]))
        return
    from paired import report

    ratios = []
    with checked_out(arguments.commit) as earlier:
        trees = {HERE: ROOT, EARLIER: earlier}
        for name, setting in SETTINGS.items():
            if name.startswith(arguments.only):
                times = seconds(name, setting, trees, arguments.rounds)
                report(name, times, STEPS, {(HERE, EARLIER): EACH})
                ratios.append(statistics.median(a / b for a, b in zip(times[HERE], times[EARLIER], strict=True)))
        print(f"geometric mean of all: {statistics.geometric_mean(ratios):.3f}  (wanted at most {MEAN:.2f})")
        report("import unidist", importing(trees), 1, {(HERE, EARLIER): 1.0})


if __name__ == "__main__":
    main()

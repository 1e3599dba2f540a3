"""From a command to the end of a first step, processes on torch: `unidist run` against torchrun with plain Keras.

    python benchmarks/starting.py [--rounds 7] [--processes 2 | --imports]

By torchrun the same Keras model trains inside DistributedDataParallel: torch, Keras, a process group, one step. Both
commands are run in turns, so that what else the machine does hits both. Time is taken until the last process has made
its step: how an interpreter ends, with all that Keras has imported, is left out. Prints the median of the paired
ratios. Restarts are another matter: see restarting.py.

--imports: of one process, `import unidist` and Keras against Keras alone; the same with `use("torch")` before Keras.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paired import report

AIM = {2: 1.0, 4: 0.9}
IMPORTS = {
    "use, and Keras": "import unidist; unidist.use('torch'); import keras",
    "unidist and Keras": "import unidist; import keras",
    "Keras": "import keras",
}
STEPPED = """
import pathlib, time
pathlib.Path(os.environ["STEPPED"], os.environ["RANK"]).write_text(str(time.time()))
"""
MODEL = """
keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((16,)), *layers])
x, y = np.ones((32, 16), "float32"), np.ones((32, 1), "float32")
"""
OURS = f"""
import os
import unidist
unidist.use("torch")
import keras, numpy as np
with unidist.DataParallel().scope():
{MODEL.replace(chr(10), chr(10) + "    ").rstrip()}
    model.compile("sgd", "mse", jit_compile=False)
model.fit(x, y, batch_size=32, verbose=0)
{STEPPED}
"""
BY_HAND = f"""
import os
import torch.distributed as dist
dist.init_process_group("gloo")
import keras, numpy as np
{MODEL}
import torch
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
loss = ((ddp(torch.from_numpy(x[:16])) - torch.from_numpy(y[:16])) ** 2).mean()
loss.backward()
optimizer.step()
{STEPPED}
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # torch aborts at its end now and then
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--processes", type=int, default=2)
    kinds.add_argument("--imports", action="store_true")
    arguments = parser.parse_args()
    if arguments.imports:
        times = paired({name: lambda _, text=text: imported(text) for name, text in IMPORTS.items()}, arguments.rounds)
        aims = {("unidist and Keras", "Keras"): 1.05, ("use, and Keras", "Keras"): 1.05}
        report("imports", times, 1, aims)
        return
    count = arguments.processes
    with tempfile.TemporaryDirectory() as name:
        ours, by_hand = Path(name, "ours.py"), Path(name, "by_hand.py")
        ours.write_text(OURS)
        by_hand.write_text(BY_HAND)
        launchers = {
            "unidist run": ["unidist", "run", "-n", str(count), "--backend", "torch", str(ours)],
            "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), str(by_hand)],
        }
        starts = {
            which: lambda number, which=which, command=command: start(
                [sys.executable, "-m", *command], Path(name, f"{which} {number}")
            )
            for which, command in launchers.items()
        }
        times = paired(starts, arguments.rounds)
    aim = AIM.get(count, 1.0)
    report(f"from the command to the end of a first step, {count} processes", times, 1, {tuple(launchers): aim})


def paired(starts: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round, after one unmeasured round; who begins alternates."""
    times: dict[str, list[float]] = {which: [] for which in starts}
    for number in range(-1, rounds):
        for which in list(starts)[:: 1 if number % 2 else -1]:
            taken = starts[which](number)
            if number >= 0:
                times[which].append(taken)
    return times


def imported(text: str) -> float:
    """Seconds of an interpreter's imports, its own start and end left out."""
    timed = f"import time; began = time.perf_counter(); {text}; print(time.perf_counter() - began, flush=True)"
    command = [sys.executable, "-c", f"{timed}; import os; os._exit(0)"]
    env = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def start(command: Sequence[str], stepped: Path) -> float:
    """Seconds until each process has made its step."""
    stepped.mkdir()
    env = {**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1", "STEPPED": str(stepped)}
    began = time.time()
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return max(float(file.read_text()) for file in stepped.iterdir()) - began


if __name__ == "__main__":
    main()

"""From a command to the end of a first step, two processes on torch: `unidist run` against torchrun with plain Keras.

    python benchmarks/starting.py [--rounds 7]

By torchrun the same Keras model trains inside DistributedDataParallel: torch, Keras, a process group, one step. Both
commands are run in turns, so that what else the machine does hits both. Time is taken until the last process has made
its step: how an interpreter ends, with all that Keras has imported, is left out. Prints the median of the paired
ratios. Restarts are another matter: see restarting.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from paired import report

AIM = 1.0
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
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        ours, by_hand = Path(name, "ours.py"), Path(name, "by_hand.py")
        ours.write_text(OURS)
        by_hand.write_text(BY_HAND)
        run = [sys.executable, "-m", "unidist", "run", "-n", "2", "--backend", "torch", str(ours)]
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(by_hand),
        ]
        times: dict[str, list[float]] = {"unidist run": [], "torchrun": []}
        for number in range(-1, rounds):
            both = [("unidist run", run), ("torchrun", torchrun)]
            for which, command in both if number % 2 else reversed(both):
                taken = start(command, Path(name, f"{which} {number}"))
                if number >= 0:
                    times[which].append(taken)
    report("from the command to the end of a first step", times, 1, {("unidist run", "torchrun"): AIM})


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

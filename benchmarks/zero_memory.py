"""A model of 400 MB of float32 weights on four processes, each held to a limit of memory that the model alone exceeds.

    unidist run -n 4 benchmarks/zero_memory.py --zero 3        trains, and prints the peak of each process
    unidist run -n 4 benchmarks/zero_memory.py --zero 0        dies of it

Weights, gradients and Adam's two slots are 1,600 MB on one device. The limit is what a process has when everything is
imported and joined, plus `--limit` MB of data (RLIMIT_DATA: the heap and private mappings).
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import unidist

unidist.use("torch")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

MB = 1 << 20
WIDTH, DEPTH = 2048, 25  # 25 kernels of 16 MB: 400 MB


def held(field: str) -> float:
    """A field of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--limit", type=float, default=800.0, help="MB of a process beyond what imports take")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)  # imports TensorFlow where it is installed
    unidist.barrier()
    data, before = held("VmData"), held("VmRSS")
    limit = int((data + arguments.limit) * MB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with unidist.DataParallel(zero=arguments.zero).scope():
        keras.utils.set_random_seed(0)
        stack = [keras.layers.Dense(WIDTH, activation="tanh", use_bias=False) for _ in range(DEPTH)]
        model = keras.Sequential([keras.layers.Input((WIDTH,)), *stack])
        model.compile(keras.optimizers.Adam(1e-4), "mse")
    rows = 4 * unidist.process_count()
    x = np.random.default_rng(0).normal(size=(rows * arguments.steps, WIDTH)).astype("float32")
    losses = model.fit(x, x * 0.5, batch_size=rows, epochs=1, shuffle=False, verbose=0).history["loss"]
    weights = 4 * WIDTH * WIDTH * DEPTH / MB
    print(
        f"stage {arguments.zero}: {weights:.0f} MB of weights, peak {held('VmHWM') - before:.0f} MB a process over the "
        f"imports (limit {arguments.limit:.0f}), {unidist.describe(model).bytes_per_device / MB:.0f} MB of weights and "
        f"slots held, loss {losses[-1]:.6f}",
        flush=True,
    )


if __name__ == "__main__":
    main()

"""What the processes of test_several.py run: several GPUs, one a rank."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch

import unidist
from tests.gpu.device import DEVICE, pause
from unidist.algebra import Group, Mesh
from unidist.backends import registry
from unidist.backends.collectives import Done

AXES = ("data", "model")


@dataclass
class Started:
    """A collective that is on its way, or done: what waits for it, and its result there and wanted."""

    wait: Callable[[], None]
    result: Callable[[], torch.Tensor]
    wanted: np.ndarray


def _values(rank: int, number: int, rows: int) -> np.ndarray:
    """What a rank has in a call: whole numbers, whose sums are exact in any order."""
    found: np.ndarray = (np.arange(rows * 3).reshape(rows, 3) % 7 + 10 * rank + number % 13).astype("float32")
    return found


def _start(comm: Any, kind: str, group: Group, number: int, rows: int) -> Started:
    """A collective over a group, of as many rows as each member sends another."""
    size, rank, index = group.size, group.ranks[group.index], group.index
    everyone = [_values(r, number, rows * size) for r in group.ranks]
    part = slice(rows * index, rows * (index + 1))
    x = torch.tensor(_values(rank, number, rows * size), device=DEVICE)
    total = np.sum(everyone, 0)
    if kind == "all_reduce_inplace":
        return Started(comm.all_reduce_inplace(x, group, "sum").wait, lambda: x, total)
    if kind == "reduce_scatter_into":
        out = x.new_empty((rows, 3))
        return Started(comm.reduce_scatter_into(out, x, group, "sum").wait, lambda: out, total[part])
    if kind == "all_gather_into":
        out = x.new_empty((rows * size * size, 3))
        return Started(comm.all_gather_into(out, x, group).wait, lambda: out, np.concatenate(everyone))
    if kind == "max":
        done = comm.all_reduce(x, group, "max")
        return Started(Done().wait, lambda: done, np.max(everyone, 0))
    if kind == "broadcast":
        root = number % size
        sent = comm.broadcast(x, group, root)
        return Started(Done().wait, lambda: sent, everyone[root])
    sizes = [rows] * size
    moved = comm.all_to_all(x, group, 0, sizes, 1, [3] * size)
    return Started(Done().wait, lambda: moved, np.concatenate([one[part] for one in everyone], 1))


KINDS = ("all_reduce_inplace", "reduce_scatter_into", "all_gather_into", "max", "broadcast", "all_to_all")


def stress(shape: tuple[int, int], turns: int, seed: int = 0) -> tuple[list[str], int, int]:
    """(results that are wrong, of how many, how many were under way at once at most).

    Collectives over both axes of a mesh and over both together, in an order that is drawn; all ranks draw the same one,
    as the program's order is. What is under way is waited for in an order of each rank's own, and streams are held up
    where each rank likes. The ranks stand in another order on each of three meshes.
    """
    comm, rank = _adapter().comm, unidist.process_index()
    common, own = random.Random(seed), random.Random(f"{seed} {rank}")
    count = shape[0] * shape[1]
    meshes = [Mesh(dict(zip(AXES, shape, strict=True)), common.sample(range(count), count)) for _ in range(3)]
    wrong: list[str] = []
    number = most = 0
    for turn in range(turns):
        mesh = meshes[turn % len(meshes)]
        started: list[tuple[str, Started]] = []
        for _ in range(common.randrange(2, 7)):
            axes, kind = common.choice([("data",), ("model",), AXES]), common.choice(KINDS)
            rows, number = 1 << common.randrange(9), number + 1
            if own.random() < 0.1:
                pause(0.001)
            started.append((f"{kind} over {axes}", _start(comm, kind, mesh.group(axes, rank), number, rows)))
        most = max(most, sum(name.startswith(("all_reduce_", "reduce_scatter", "all_gather")) for name, _ in started))
        own.shuffle(started)
        for name, one in started:
            one.wait()
            if not np.array_equal(one.result().cpu().numpy(), one.wanted):
                wrong.append(f"turn {turn}: {name}")
    return wrong, number, most


def _adapter() -> Any:
    return registry.current()


# a rank that is killed ------------------------------------------------------------------------------------------------


def killed(step: int, kills: int = 1) -> None:
    """A training in which a rank is killed amid a step, behind others that went well."""
    keras.utils.set_random_seed(0)
    with unidist.DataParallel().scope():
        model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(4))])
        model.compile("adam", "mse")

    class Killing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == step and unidist.process_index() == kills:
                os.kill(os.getpid(), signal.SIGKILL)

    x = np.ones((4 * 10_000, 64), "float32")
    model.fit(x, x, batch_size=4, verbose=0, callbacks=[Killing()])


if __name__ == "__main__":
    unidist.use("torch")
    killed(step=20)

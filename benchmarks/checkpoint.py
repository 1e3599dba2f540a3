"""Checkpoints of a Keras model on torch against plain writes, PyTorch's own checkpoints and Keras's files, in one run.

    unidist run -n 2 benchmarks/checkpoint.py                       1 GiB of weights and Adam's slots
    unidist run -n 2 benchmarks/checkpoint.py --megabytes 256 --folder /mnt/disk

Weights are cut over the processes (ZeRO, stage 3). All write the same shards to the same disk, in turns, and bring them
there; the best of each counts. What returns before it is written is timed until it returns. Reads are of what the
system holds in memory. Memory is what process 0 holds at most beside what it held before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import unidist

unidist.use("torch")

import keras  # noqa: E402
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

from unidist.backends.environment import MEMORY  # noqa: E402
from unidist.checkpoint.reading import Reader  # noqa: E402
from unidist.keras.checkpoint import api as checkpoints  # noqa: E402
from unidist.keras.checkpoint.copies import Copies  # noqa: E402
from unidist.keras.checkpoint.states import State  # noqa: E402
from unidist.launch.run import Memory  # noqa: E402

MIB = 1 << 20
LAYERS = 8


def net(megabytes: int) -> Any:
    """A model whose weights and Adam's slots have so many MiB."""
    size = int((megabytes * MIB / 3 / LAYERS / 4) ** 0.5)
    with unidist.DataParallel(zero=3).scope():
        layers = [keras.layers.Dense(size, use_bias=False, name=f"layer_{k}") for k in range(LAYERS)]
        model = keras.Sequential([keras.Input((size,)), *layers], name="net")
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    State.of(model)
    return model


def shards(model: Any) -> dict[str, tuple[torch.Tensor, int | None]]:
    """name -> (what this process stores, the dim in which it is cut)."""
    found = {}
    for tensor, held in State.of(model).variables:
        held.fetch()
        dims = [k for k, axes in enumerate(held.sharding.layout.dims) if axes] if held.sharding is not None else []
        found[tensor.name] = next(iter(held._tensors.values())).detach(), dims[0] if dims else None
    return found


def as_dtensors(held: dict[str, tuple[torch.Tensor, int | None]]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (unidist.process_count(),))
    return {n: t if dim is None else DTensor.from_local(t, mesh, [Shard(dim)]) for n, (t, dim) in held.items()}


def status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak(work: Callable[[], object]) -> float:
    """What this process holds at most beside what it held before, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def write_plainly(path: Path, arrays: list[np.ndarray]) -> None:
    with path.open("wb", buffering=0) as file:
        for array in arrays:
            data = array.reshape(-1).view(np.uint8)
            for begin in range(0, len(data), MIB):
                file.write(data[begin : begin + MIB].data)
        os.fsync(file.fileno())


class Works:
    """What is timed: (until it returns, what is waited for after that)."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder, self.model = folder, net(megabytes)
        held = shards(self.model)
        self.arrays = [tensor.numpy() for tensor, _ in held.values()]
        self.bytes = sum(array.nbytes for array in self.arrays)
        self.tensors = as_dtensors(held)
        self.buffer = np.zeros(self.bytes, np.uint8)
        self.future: Any = None
        count = unidist.process_count()
        self.of_one_node, self.of_several = self.copies([1] * count), self.copies([*range(count)])
        self.step = 0

    def copies(self, nodes: list[int]) -> Copies:
        """Steps in memory, as a launcher on each of these nodes would keep them."""
        place = unidist.process_index()
        memory = Memory(len(nodes))
        _, *words = memory.variables[MEMORY].split()
        with mock.patch.dict(os.environ, {MEMORY: " ".join([str(nodes[place]), *words])}):
            return Copies("checkpoints")

    def keep(self, copies: Copies) -> None:
        self.step += 1
        copies.save(self.model, self.step, {})

    def clear(self) -> None:
        """Each writes into an empty folder."""
        unidist.barrier()
        if unidist.process_index() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        unidist.barrier()

    def memcpy(self) -> None:
        at = 0
        for array in self.arrays:
            self.buffer[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
            at += array.nbytes

    def raw(self) -> None:
        write_plainly(self.folder / f"raw-{unidist.process_index()}", self.arrays)

    def dcp_async(self) -> None:
        writer = dcp.FileSystemWriter(self.folder / "dcp")
        self.future = dcp.async_save(self.tensors, storage_writer=writer)

    def wait(self) -> None:
        checkpoints.wait()
        if self.future is not None:
            self.future.result()
            self.future = None

    def hugging_face(self) -> None:
        writer = dcp.HuggingFaceStorageWriter(str(self.folder / "hf"), save_distributed=True)
        dcp.save(self.tensors, storage_writer=writer)

    def writes(self) -> dict[str, Callable[[], object]]:
        found: dict[str, Callable[[], object]] = {
            "memcpy of the shards": self.memcpy,
            "plain writes and fsync": self.raw,
            "unidist.save": lambda: unidist.save(self.model, self.folder, step=1),
            "unidist.save(asynchronous=True)": lambda: unidist.save(self.model, self.folder, step=2, asynchronous=True),
            "in memory, of one node": lambda: self.keep(self.of_one_node),
            "in memory, and at the next node": lambda: self.keep(self.of_several),
            "DCP save": lambda: dcp.save(self.tensors, storage_writer=dcp.FileSystemWriter(self.folder / "dcp")),
            "DCP async_save": self.dcp_async,
        }
        if hasattr(dcp, "HuggingFaceStorageWriter"):
            found["DCP save, safetensors"] = self.hugging_face
        found["Keras's save_weights"] = lambda: self.model.save_weights(self.folder / "model.weights.h5")
        return found


def best(works: Works, named: dict[str, Callable[[], object]], times: int, *, clears: bool) -> dict[str, float]:
    """Seconds of each until all processes have returned, in turns."""
    took = dict.fromkeys(named, float("inf"))
    for _ in range(times):
        for name, work in named.items():
            if clears:
                works.clear()
            unidist.barrier()
            began = time.perf_counter()
            work()
            unidist.barrier()
            took[name] = min(took[name], time.perf_counter() - began)
            works.wait()
    return took


def read(works: Works, times: int) -> tuple[dict[str, float], float]:
    """(seconds of each reader, bytes that process 0 read / bytes of its shards)."""
    works.clear()
    unidist.save(works.model, works.folder, step=1)
    dcp.save(works.tensors, storage_writer=dcp.FileSystemWriter(works.folder / "dcp"))
    counts: list[int] = []

    class Counting(Reader):
        def close(self) -> None:
            counts.append(self.bytes_read)
            super().close()

    with mock.patch("unidist.keras.checkpoint.api.Reader", Counting):
        unidist.restore(works.model, works.folder)
    named: dict[str, Callable[[], object]] = {
        "unidist.restore": lambda: unidist.restore(works.model, works.folder),
        'unidist.restore(verify="off")': lambda: unidist.restore(works.model, works.folder, verify="off"),
        "DCP load": lambda: dcp.load(works.tensors, storage_reader=dcp.FileSystemReader(works.folder / "dcp")),
    }
    return best(works, named, times, clears=False), sum(counts) / works.bytes


def tell(title: str, took: dict[str, float], nbytes: int) -> None:
    print(f"{title}: {nbytes / MIB:.0f} MiB")
    for name, seconds in took.items():
        print(f"  {name:34s} {seconds:7.2f} s  {nbytes / MIB / seconds:7.0f} MiB/s")


def ratio(took: dict[str, float], left: str, right: str, wanted: float | None = None) -> None:
    if right in took:
        text = "" if wanted is None else f"  (wanted at most {wanted:.2f})"
        print(f"  {left} / {right}: {took[left] / took[right]:.2f}{text}")


def measure(folder: Path, megabytes: int, times: int) -> None:
    works = Works(folder, megabytes)
    works.clear()
    held = {"unidist.save": peak(lambda: unidist.save(works.model, folder, step=1))}
    copying = peak(lambda: unidist.save(works.model, folder, step=2, asynchronous=True))
    works.wait()
    held["unidist.restore"] = peak(lambda: unidist.restore(works.model, folder))
    wrote = best(works, works.writes(), times, clears=True)
    took, share = read(works, times)
    if unidist.process_index():
        return
    total = works.bytes * unidist.process_count()
    tell("writing", wrote, total)
    ratio(wrote, "unidist.save(asynchronous=True)", "memcpy of the shards", 1.2)
    ratio(wrote, "unidist.save(asynchronous=True)", "DCP async_save", 1.0)
    ratio(wrote, "in memory, of one node", "memcpy of the shards")
    ratio(wrote, "in memory, and at the next node", "plain writes and fsync")
    ratio(wrote, "unidist.save", "plain writes and fsync", 1 / 0.9)
    ratio(wrote, "unidist.save", "DCP save", 1.0)
    ratio(wrote, "unidist.save", "DCP save, safetensors", 1.0)
    tell("reading", took, total)
    ratio(took, "unidist.restore", "DCP load", 1.0)
    print(f"  bytes read / bytes of the process's shards: {share:.3f}")
    print("memory beside the shards")
    for name, mebibytes in held.items():
        print(f"  {name:34s} {mebibytes:7.0f} MiB  (wanted at most 64)")
    text = f"{copying / (works.bytes / MIB):.2f} x the shards (wanted at most 1.00)"
    print(f"  {'unidist.save(asynchronous=True)':34s} {copying:7.0f} MiB  {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = arguments.folder / "unidist-checkpoints"
    try:
        measure(folder, arguments.megabytes, arguments.times)
        unidist.barrier()
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()

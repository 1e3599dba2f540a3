"""Writing and reading a checkpoint's format against plain writes and reads of the same bytes, in one run.

    python benchmarks/checkpoint_format.py                    1 GB in the temporary folder
    python benchmarks/checkpoint_format.py --megabytes 256 --folder /mnt/disk

Each is done `--times` times in turn, and the best counts. Reads are of what the system holds in memory: what is
compared is the work beside the disk's. Peak memory is what a process of its own has held beyond what it began with.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from unidist.checkpoint.folders import FolderDirectory
from unidist.checkpoint.reading import Reader
from unidist.checkpoint.tensors import Tensor, files_of

MB = 10**6
PIECE = 1 << 20


def status(field: str) -> float:
    """A field of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / MB


def arrays(megabytes: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    count = max(1, megabytes // 64)
    shape = (1000, megabytes * MB // count // 4000)
    return {f"layer_{k}/kernel": draw.integers(0, 2**32, shape, np.uint32).view(np.float32) for k in range(count)}


def write_plainly(folder: Path, held: dict[str, np.ndarray]) -> None:
    with (folder / "plain").open("wb", buffering=0) as file:
        for array in held.values():
            data = array.reshape(-1).view(np.uint8)
            for begin in range(0, len(data), PIECE):
                file.write(data[begin : begin + PIECE].data)
        os.fsync(file.fileno())


def write_steps(folder: Path, held: dict[str, np.ndarray]) -> None:
    files = files_of([Tensor(name, "float32", array.shape) for name, array in held.items()])
    directory = FolderDirectory(folder)
    step = directory.prepare(1, files)
    with directory.writer(step, files, 0) as part:
        for name, array in held.items():
            part.write(name, 0, array)
        part.finish()
    directory.commit(step, files, {}, 1)


def read_plainly(folder: Path, out: np.ndarray) -> None:
    """The tensors' bytes from the step's own files: copies cost by how source and target are aligned."""
    at = 0
    for path in sorted((folder / "step-00000001").glob("model-*.safetensors")):
        with path.open("rb", buffering=0) as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            while at < len(out) and (got := file.readinto(out[at : at + PIECE].data)):
                at += got


def read_step(folder: Path, out: np.ndarray, verify: str) -> None:
    with Reader(folder, verify=verify) as reader:
        at = 0
        for name, tensor in reader.tensors.items():
            reader.read_into(name, None, out[at : at + tensor.nbytes])
            at += tensor.nbytes


def read_columns(folder: Path, out: np.ndarray, verify: str) -> None:
    """A quarter of each tensor's columns, as a process of a mesh reads it."""
    with Reader(folder, verify=verify) as reader:
        at = 0
        for name, tensor in reader.tensors.items():
            rows, columns = tensor.shape
            nbytes = rows * (columns // 4) * 4
            reader.read_into(name, ((0, rows), (columns // 4, columns // 4)), out[at : at + nbytes])
            at += nbytes


def peak(work: Callable[..., None], *given: object) -> float:
    """What a fork of this process holds at most beyond what it begins with, in MB."""

    def measured(told: multiprocessing.Queue) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        work(*given)
        told.put(status("VmHWM") - before)

    context = multiprocessing.get_context("fork")
    told: multiprocessing.Queue = context.Queue()
    process = context.Process(target=measured, args=(told,))
    process.start()
    found = told.get()
    process.join()
    return float(found)


def best(times: int, works: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of each, in turn."""
    took = dict.fromkeys(works, float("inf"))
    for _ in range(times):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            took[name] = min(took[name], time.perf_counter() - begin)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="unidist-format-", dir=options.folder))
    try:
        held = arrays(options.megabytes)
        total = sum(array.nbytes for array in held.values()) / MB
        writes = {"plain": lambda: write_plainly(folder, held), "step": lambda: write_steps(folder, held)}
        wrote = best(options.times, writes)
        held_writing = peak(write_steps, folder, held)
        out = np.zeros(int(total * MB), np.uint8)
        reads = {
            "plain": lambda: read_plainly(folder, out),
            "read": lambda: read_step(folder, out, "read"),
            "off": lambda: read_step(folder, out, "off"),
            "columns": lambda: read_columns(folder, out, "read"),
        }
        took = best(options.times, reads)
        held_reading = peak(read_step, folder, out, "read")
    finally:
        shutil.rmtree(folder)
    print(f"writing {total:.0f} MB: {wrote['step']:.2f} s, plainly {wrote['plain']:.2f} s", end="; ")
    print(f"ratio {wrote['step'] / wrote['plain']:.2f}, peak memory {held_writing:.0f} MB")
    for verify in ("read", "off"):
        print(f'reading, verify="{verify}": {took[verify]:.2f} s, plainly {took["plain"]:.2f} s', end="; ")
        print(f"ratio {took[verify] / took['plain']:.2f}")
    print(f"a quarter of all columns, verified: {took['columns']:.2f} s")
    print(f"peak memory of reading, beside the array that is read into: {held_reading:.0f} MB")


if __name__ == "__main__":
    main()

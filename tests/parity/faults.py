"""What the tests of faults of checkpoints run in processes: full disks, damaged files, and killing."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.parity.train import Spec
from tests.support.clearing import cleared

# What changes a folder, or brings it to the disk.
CHANGES = ("pwrite", "fsync", "rename", "unlink", "rmdir", "mkdir")


def build(spec: Spec | None) -> Any:
    import contextlib

    import keras

    import unidist

    cleared()
    scope: Any = contextlib.nullcontext()
    if spec is not None:
        mesh = unidist.Mesh(dict(spec.axes), spec.devices)
        rules = {".*rows/kernel": ("model", None), ".*columns/kernel": (None, "model")}
        scope = unidist.ModelParallel(mesh, unidist.LayoutMap(mesh, rules), zero=spec.zero).scope()
    with scope:
        columns, rows = keras.layers.Dense(8, name="columns"), keras.layers.Dense(5, name="rows")
        model = keras.Sequential([keras.Input((600,)), columns, rows], name="net")
        model.compile(keras.optimizers.SGD(0.125, momentum=0.5), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def _value(path: str, step: int, shape: Any) -> Any:
    return np.random.default_rng([zlib.crc32(path.encode()), step]).normal(size=shape).astype("float32")


def _filled(model: Any) -> list[Any]:
    return [v for v in [*model.variables, *model.optimizer.variables] if len(v.shape)]


def fill(model: Any, step: int) -> None:
    for variable in _filled(model):
        variable.assign(_value(variable.path, step, tuple(variable.shape)))


def has(model: Any, step: int) -> bool:
    """Whether all values are those of a step."""
    return all(np.array_equal(np.asarray(v), _value(v.path, step, tuple(v.shape))) for v in _filled(model))


def place() -> int:
    import unidist

    return int(unidist.process_index())


def told(work: Callable[[], Any]) -> str:
    """The text of the CheckpointError that work raises; "" where it raises none."""
    import unidist

    try:
        work()
    except unidist.CheckpointError as error:
        return str(error) or "without words"
    return ""


def _raising(number: int) -> Any:
    def pwrite(*given: Any) -> int:
        raise OSError(number, os.strerror(number))

    return pwrite


def full_disk(folder: str, spec: Spec, at: int, asynchronous: bool) -> tuple[list[str], bool, list[Any]]:
    """(what the saves said, whether training went on, steps that count): of a step that is written, one for which the
    process at a place has no space, and another one that is written."""
    import unidist
    from unidist.keras.checkpoint import api as checkpoints
    from unidist.keras.checkpoint import later

    model = build(spec)
    fill(model, 1)
    said = [told(lambda: unidist.save(model, folder, step=1, asynchronous=asynchronous)), told(checkpoints.wait)]
    if asynchronous:
        with _no_space_in_the_other_process(later._writer.background if place() == at else None):
            said.append(told(lambda: unidist.save(model, folder, step=2, asynchronous=True)))
            said.append(told(checkpoints.wait if spec.zero else lambda: unidist.save(model, folder, step=9)))
    else:
        with mock.patch("os.pwrite", _raising(errno.ENOSPC) if place() == at else os.pwrite):
            said.append(told(lambda: unidist.save(model, folder, step=2)))
    before = [np.asarray(v).copy() for v in model.trainable_variables]
    model.fit(np.ones((4, 600), "float32"), np.ones((4, 5), "float32"), batch_size=4, verbose=0)
    goes_on = any((np.asarray(v) != b).any() for v, b in zip(model.trainable_variables, before, strict=True))
    fill(model, 3)
    said += [told(lambda: unidist.save(model, folder, step=3, asynchronous=asynchronous)), told(checkpoints.wait)]
    fill(model, 0)
    said.append(told(lambda: unidist.restore(model, folder)))
    unidist.barrier()
    return said, goes_on and has(model, 3), sorted(path.name for path in Path(folder).iterdir())


@contextmanager
def _no_space_in_the_other_process(background: Any) -> Iterator[None]:
    if background is None:
        yield
        return
    pid = background._child[0].pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (16, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def write(folder: str, spec: Spec, steps: tuple[int, ...]) -> None:
    import unidist

    model = build(spec)
    for step in steps:
        fill(model, step)
        unidist.save(model, folder, step=step)


def save_and_restore(folders: list[str], spec: Spec, facts: Any = None) -> tuple[str, str]:
    """What both say, each process with a folder of its own."""
    import unidist

    model = build(spec)
    where = folders[place() % len(folders)]
    return (
        told(lambda: unidist.save(model, where, step=1, facts=facts)),
        told(lambda: unidist.restore(model, where)),
    )


def restore(folder: str, spec: Spec | None) -> str:
    import unidist

    return told(lambda: unidist.restore(build(spec), folder))


def save_until(folder: str, spec: Spec, seed: int, count: int, at: int | None) -> None:
    """Saves step after step.

    Args:
        count: without `at`, of copies of the folder that are kept, as it was after some change by any process: that is
            what a SIGKILL of all leaves. With it, the change after which the process of this place ends itself.
    """
    import unidist

    model, draw = build(spec), random.Random(seed + place())
    changes, saved, stopped = 0, 0, False
    Path(folder).mkdir(exist_ok=True)
    copies = Path(f"{folder}-copies")
    copies.mkdir(exist_ok=True)

    def changing(really: Callable[..., Any]) -> Callable[..., Any]:
        def change(*given: Any, **named: Any) -> Any:
            nonlocal changes
            if stopped:
                return really(*given, **named)
            with lock.open() as held:
                # Nobody else changes anything while a copy is made.
                fcntl.flock(held, fcntl.LOCK_EX)
                found = really(*given, **named)
                changes += 1
                if at is not None:
                    if at == place() and changes == count:
                        os.kill(os.getpid(), signal.SIGKILL)
                elif draw.random() < 0.2:
                    _copy(folder, copies / f"{place()}-{changes}-{saved}")
            return found

        return change

    lock = Path(f"{folder}-lock")
    lock.touch()
    replaced: dict[str, Any] = {name: changing(really) for name, really in _REALLY.items()}
    with mock.patch.multiple("os", **replaced):
        step = 0
        while not _is_enough(copies, count):
            step += 1
            fill(model, step)
            # A step is written anew too.
            for _ in range(1 + step % 2):
                unidist.save(model, folder, step=step, keep=2)
                saved = step
            unidist.barrier()


def _copy(folder: str, to: Path) -> None:
    # What copies is of the patched functions too.
    with mock.patch.multiple("os", **_REALLY):
        shutil.copytree(folder, to)


_REALLY: dict[str, Any] = {name: getattr(os, name) for name in CHANGES}


def _is_enough(copies: Path, count: int) -> bool:
    import unidist

    unidist.barrier()
    enough = len(list(copies.iterdir())) >= count
    unidist.barrier()
    return enough


def save_until_killed(folder: str, spec: Spec, after: float, asynchronous: bool) -> None:
    """Goes on from the latest step, whose values are looked at, and saves step after step. All processes are killed
    that many seconds after they have begun to save, or after the first step of all. `saved` beside the folder has the
    last step whose save returned.
    """
    import unidist
    from unidist.keras.checkpoint import api as checkpoints

    model, beside = build(spec), Path(f"{folder}-beside")
    # What is traced and compiled takes longer than what follows.
    fill(model, 0)
    unidist.save(model, f"{folder}-before", step=1)
    step = checkpoints.latest(folder) or 0
    if step:
        unidist.restore(model, folder, verify="all")
        assert has(model, step), f"step {step} was restored with other values"
    beside.mkdir(exist_ok=True)
    (beside / f"process-{place()}").write_text(str(os.getpid()))
    if not step:
        # A slow machine writes none in that time, and then there is nothing to go on from.
        step = 1
        fill(model, step)
        unidist.save(model, folder, step=step, keep=3)
        (beside / "saved").write_text(str(step))
    unidist.barrier()
    if place() == 0:
        processes = " ".join(path.read_text() for path in beside.glob("process-*"))
        # By another process: at any moment, whatever this one is about.
        subprocess.Popen(["sh", "-c", f"sleep {after}; kill -9 {processes}"])
    while True:
        step += 1
        fill(model, step)
        unidist.save(model, folder, step=step, keep=3, asynchronous=asynchronous)
        if place() == 0:
            # In the background the one before is certain.
            (beside / "half").write_text(str(step - asynchronous))
            (beside / "half").rename(beside / "saved")


def is_of(folder: Path, step: int) -> bool:
    """Whether a step's files have its values, read without a framework."""
    from unidist.checkpoint.reading import Reader

    with Reader(folder, step, "all") as reader:
        found = {n: t for n, t in reader.tensors.items() if t.kind in ("model", "optimizer") and t.shape}
        return len(found) == 8 and all(
            reader.read(name).tobytes() == _value(name, step, tensor.shape).tobytes() for name, tensor in found.items()
        )


def loads(folders: list[str]) -> list[tuple[int, bool]]:
    """(the latest step, or 0; whether it has its values) of each folder, on one device."""
    import unidist
    from unidist.keras.checkpoint.api import latest

    model, found = build(None), []
    for folder in folders:
        step = latest(folder) or 0
        if step:
            fill(model, 0)
            unidist.restore(model, folder, verify="all")
        found.append((step, not step or has(model, step)))
    return found

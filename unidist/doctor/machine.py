"""Finds what this machine lets a process have: cores and threads, memory, shared memory, open files."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from unidist.doctor.check import Check, Question, counted
from unidist.launch import counting

_GIB = 2**30
# A process that has imported Keras and a framework.
_PROCESS_BYTES = _GIB
# Containers get 64 MiB where nobody says; data loaders and NCCL put their buffers there.
_SHARED_BYTES = _GIB // 2
# A process of its own accord, and connections to each other process, for the world and for the axes of a mesh.
_FILES, _FILES_EACH = 256, 16
_SYSTEM = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Holds what was found. None: the system does not say.

    Attributes:
        cores: those that this process may run on.
        quota: how many of them at a time its container may use; None: all.
        memory: bytes that are available.
        memory_limit: bytes that its container may use; None: all.
        shared: bytes free in /dev/shm.
        files: the soft and the hard limit of open files.
    """

    cores: int
    quota: float | None
    memory: int
    memory_limit: int | None
    shared: int | None
    files: tuple[int, int]


def look(system: Path = _SYSTEM) -> Machine:
    """Reads all of it from this machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        cores=counting.cores(),
        quota=_quota(system),
        memory=psutil.virtual_memory().available,
        memory_limit=_limit(system),
        shared=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        files=tuple(_UNLIMITED if n == resource.RLIM_INFINITY else n for n in (soft, hard)),  # type: ignore[arg-type]
    )


def check(machine: Machine, environ: Mapping[str, str], processes: int, world: int) -> list[Check]:
    """All checks of the machine.

    Args:
        machine: what was found.
        environ: the environment of the processes.
        processes: how many will run on this machine.
        world: how many will run everywhere.
    """
    return [
        _cores(machine),
        _threads(machine, environ, processes),
        _memory(machine, processes),
        _shared(machine),
        _files(machine, world),
    ]


def _usable(machine: Machine) -> float:
    return min(machine.cores, machine.quota or machine.cores)


def _cores(machine: Machine) -> Check:
    quota = "" if machine.quota is None else f"; its container may use {machine.quota:g} at a time"
    return Question("cores", "cores are known").ok(f"{machine.cores}{quota}")


def _threads(machine: Machine, environ: Mapping[str, str], processes: int) -> Check:
    question = Question("threads", "threads of all processes are no more than the cores")
    text, usable = environ.get("OMP_NUM_THREADS"), _usable(machine)
    share = max(1, int(usable) // processes)
    advice = f"export OMP_NUM_THREADS={share}"
    if text is None:
        if machine.quota is not None and machine.quota < machine.cores:
            found = f"OMP_NUM_THREADS is not set: frameworks start {machine.cores} threads, and {usable:g} can run"
            return question.warning(found, advice)
        shared = "`unidist run` shares the cores out to processes of torch and Horovod"
        return question.ok(f"OMP_NUM_THREADS is not set; {shared}")
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return question.failed(f"OMP_NUM_THREADS={text!r} is no number of threads", advice)
    found = f"OMP_NUM_THREADS={text}, {counted(processes, 'process')}, {usable:g} cores"
    if int(first) * processes > usable and int(first) > 1:
        return question.warning(found, advice)
    return question.ok(found)


def _memory(machine: Machine, processes: int) -> Check:
    question = Question("memory", f"{_size(_PROCESS_BYTES)} are free for each process")
    known = [n for n in (machine.memory, machine.memory_limit) if n is not None]
    found = f"{_size(min(known))} for {counted(processes, 'process')}"
    if min(known) < processes * _PROCESS_BYTES:
        return question.warning(found, "start fewer processes on this machine, or give its container more memory")
    return question.ok(found)


def _shared(machine: Machine) -> Check:
    question = Question("shared memory", f"{_size(_SHARED_BYTES)} are free in /dev/shm")
    if machine.shared is None:
        return question.not_checked("there is no /dev/shm")
    if machine.shared < _SHARED_BYTES:
        advice = "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
        return question.warning(_size(machine.shared), advice)
    return question.ok(_size(machine.shared))


def _files(machine: Machine, world: int) -> Check:
    soft, hard = machine.files
    needed = _FILES + _FILES_EACH * world
    question = Question("open files", f"a process may open {needed} files and connections")
    if soft >= needed:
        return question.ok("no limit" if soft >= _UNLIMITED else f"{soft}")
    allowed = "" if hard >= needed else " (the hard limit is lower: ask the administrator, or docker run --ulimit)"
    answer = question.failed if soft < _FILES else question.warning
    return answer(f"{soft}", f"ulimit -n {needed}{allowed}")


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.0f} MiB"


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # this kernel has no such file
        return []


def _quota(system: Path) -> float | None:
    words = _read(system / "cpu.max")
    if not words:  # the older kind
        words = [*_read(system / "cpu/cpu.cfs_quota_us"), *_read(system / "cpu/cpu.cfs_period_us")]
    if len(words) != 2 or not words[0].isdecimal():
        return None
    return int(words[0]) / int(words[1])


def _limit(system: Path) -> int | None:
    words = _read(system / "memory.max") or _read(system / "memory/memory.limit_in_bytes")
    return int(words[0]) if words and words[0].isdecimal() and int(words[0]) < _UNLIMITED else None

"""The process that others are forked from. Run by path: imports no unidist but what it is asked to.

    python .../forking.py DESCRIPTOR ROOM

DESCRIPTOR is a socket to a ForkServer (forkserver.py). ROOM is a text that is long enough for the forked processes to
show their own commands in its place.

What is imported is imported by a thread beside the main one, for two reasons. Linux gives each thread a priority of its
own, and nobody may raise one again: so that thread alone is of a low one, and what the main thread forks is of the
usual one. And the main thread sees meanwhile that the other end has gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from typing import Any

LONGEST = 1 << 20
READY, REFUSED, STARTED, ENDED = "ready", "refused", "started", "ended"
# A tenth of what a training gets that wants the same core. What is imported costs it the same seconds at the lowest
# priority, 19, which is a seventieth: but then it is ready only after minutes.
_LOW = 10
# What a scheduler sends to all processes of a job is for those that were forked.
_NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Devices that a fork may share.
_HARMLESS = ("null", "zero", "full", "random", "urandom", "tty", "pts/", "shm/", "nvidia")
# They start processes, or look for devices, when they are imported.
_BUSY = ("torch._inductor", "torch.testing")


def serve(connection: socket.socket) -> Callable[[], Any]:
    """Imports what it is asked to, then forks until the other end is closed.

    Returns in forked processes alone: what each is to run, where nothing of this module is left on the stack.
    """
    wanted = json.loads(connection.recv(LONGEST))
    _show("arguments", ["unidist: what processes are forked from, once they start again"])
    if not sys.flags.safe_path:
        del sys.path[0]
    known = set(sys.path)
    sys.path += [entry for entry in wanted["path"] if entry not in known]
    given = dict(os.environ)
    # A fifth of the time of importing, and what is imported is not garbage.
    gc.disable()
    why = _imported(connection, wanted) or _unsafe(wanted)
    if why:
        connection.send(json.dumps([REFUSED, 0, why]).encode())
        sys.exit(1)
    made = {name: value for name, value in os.environ.items() if given.get(name) != value}
    # What is imported stays: collecting garbage in a child would copy its memory.
    gc.collect()
    gc.freeze()
    gc.enable()
    connection.send(json.dumps([READY, os.getpid(), 0]).encode())
    return _forked(connection, made, is_of_a_run=wanted["told"] is not None)


# importing ------------------------------------------------------------------------------------------------------------


def _imported(connection: socket.socket, wanted: Mapping[str, Any]) -> str:
    """Imports. Gives why that failed, or ""."""
    failed: list[str] = []
    thread = threading.Thread(target=_import, args=(wanted, failed))
    thread.start()
    while thread.is_alive():
        if select.select([connection], [], [], 0.05)[0]:
            os._exit(1)
    thread.join()
    return "".join(failed)


def _import(wanted: Mapping[str, Any], failed: list[str]) -> None:
    quiet = wanted["told"] is not None
    if quiet:
        _set_priority(_LOW)
    name = ""
    try:
        for name in wanted["modules"]:
            importlib.import_module(name)
        for name in _wanted_by_the_program(wanted) if quiet else ():
            # What the framework made while it ran is no file.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    except BaseException as error:
        failed.append(f"importing {name} failed: {type(error).__name__}: {error}")
    if quiet:
        _set_priority(0)


def _set_priority(nice: int) -> None:
    """Sets the priority of this thread, while it is lowered, and of this session against others.

    The latter where the kernel schedules by those.
    """
    if nice:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(nice, os.nice(0)))
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(nice))


def _wanted_by_the_program(wanted: Mapping[str, Any]) -> list[str]:
    told = json.loads(_text(wanted["told"]))["modules"]
    ours = [name for name in told if name.partition(".")[0] in wanted["frameworks"]]
    return [name for name in ours if not name.startswith(_BUSY)]


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


# whether forking is safe ----------------------------------------------------------------------------------------------


def _unsafe(wanted: Mapping[str, Any]) -> str:
    """Why what is forked from here would differ from a process that imported by itself, or ""."""
    # OpenBLAS ends its threads before a fork, and starts them when they are needed.
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    if threads := _other_threads():
        return f"what was imported has started {threads} threads"
    if device := next(_devices(), None):
        return f"what was imported has opened {device}"
    if wanted["told"] is not None and (name := _stranger(wanted)):
        return f"the program has a module {name} of its own"
    return ""


def _other_threads() -> int:
    for _ in range(50):
        # The kernel's part of a thread ends a moment after Python's.
        if not (found := len(os.listdir("/proc/self/task")) - 1 if os.path.isdir("/proc/self/task") else 0):
            break
        time.sleep(0.02)
    return found


def _devices() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            if path.startswith("/dev/") and not path.removeprefix("/dev/").startswith(_HARMLESS):
                yield path
    if _has_cuda():
        yield "CUDA"


def _has_cuda() -> bool:
    """Returns whether CUDA was initialised here: a forked process could not use it.

    (Looking at NVML does not.)
    """
    try:
        if "libcuda.so" not in _text("/proc/self/maps"):
            return False
    except OSError:
        return False
    import ctypes

    context = ctypes.c_void_p()
    try:
        # 3 is CUDA_ERROR_NOT_INITIALIZED.
        return bool(ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) != 3)
    except (OSError, AttributeError):
        return True


def _stranger(wanted: Mapping[str, Any]) -> str:
    """A module that the program would not find, or not where we did, or ""."""
    told = json.loads(_text(wanted["told"]))
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if module is sys.modules["__main__"] or not file:
            continue
        if name in told["modules"]:
            differs = told["modules"][name] not in ("", file)
        elif "." in name or name in told["absent"]:
            differs = name in told["absent"]
        else:
            spec = PathFinder.find_spec(name, [wanted["folder"]])
            differs = spec is not None and spec.loader is not None and spec.origin != file
        if differs:
            return name
    return ""


# forking --------------------------------------------------------------------------------------------------------------


def _forked(connection: socket.socket, made: Mapping[str, str], is_of_a_run: bool) -> Callable[[], Any]:
    wakes, wakened = socket.socketpair()
    wakened.setblocking(False)
    signal.set_wakeup_fd(wakened.fileno(), warn_on_full_buffer=False)
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (*_NOT_FOR_US, signal.SIGCHLD)}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    running: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for source in (connection, wakes):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wakes:
                    wakes.recv(4096)
                    continue
                message, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
                if not message:
                    _end_all(running, is_of_a_run)
                wanted = json.loads(message)
                has_begun, begins = os.pipe()
                signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
                if not (pid := os.fork()):
                    selector.close()
                    for one in (connection, wakes, wakened):
                        one.close()
                    _become(wanted, streams, made, handlers)
                    os.close(has_begun)
                    os.close(begins)
                    return partial(_function(wanted["target"]), *wanted["arguments"])
                signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
                for stream in (*streams, begins):
                    os.close(stream)
                # Until it is in its own session and shows its own environment, it could not be found.
                os.read(has_begun, 1)
                os.close(has_begun)
                running.add(pid)
                connection.send(json.dumps([STARTED, pid, 0]).encode())
            _tell_ended(connection, running)


def _tell_ended(connection: socket.socket, running: set[int]) -> None:
    for pid in tuple(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            running.remove(pid)
            connection.send(json.dumps([ENDED, pid, os.waitstatus_to_exitcode(status)]).encode())


def _end_all(running: set[int], is_of_a_run: bool) -> None:
    if is_of_a_run:
        with contextlib.suppress(Exception):
            runpy.run_path(os.path.join(os.path.dirname(__file__), "program.py"))["end_others"]()
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


# in a forked process --------------------------------------------------------------------------------------------------


def _become(
    wanted: Mapping[str, Any], streams: Sequence[int], made: Mapping[str, str], handlers: dict[int, Any]
) -> None:
    """As `python` with this environment and these streams would begin."""
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if wanted["session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    command = [sys.executable, *wanted["command"]]
    _show("environment", [f"{name}={value}" for name, value in wanted["env"].items()])
    _show("arguments", command)
    os.environ.clear()
    os.environ.update({**wanted["env"], **made})
    os.chdir(wanted["cwd"])
    sys.orig_argv, sys.argv = command, command[1:]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    # Another name of this program, which libraries for multiprocessing give.
    sys.modules.pop("__mp_main__", None)
    # NumPy draws its first seed when it is imported; Python's own generator does this by itself after a fork.
    if (drawing := sys.modules.get("numpy.random")) is not None:
        drawing.seed()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)


def _function(target: str) -> Any:
    place, _, name = target.rpartition(":")
    return runpy.run_path(place)[name] if os.sep in place else getattr(importlib.import_module(place), name)


def _show(what: str, texts: Sequence[str]) -> None:
    """Writes what others see of this process in /proc, which would be what this program was started with.

    By the environment that is seen there the launcher finds the processes of a run. Names of ours come first, since
    what there is no room for is left out.
    """
    import ctypes

    with contextlib.suppress(OSError, ValueError, IndexError):
        numbers = [int(word) for word in _text("/proc/self/stat").rpartition(")")[2].split()[45:49]]
        begin, end = numbers[:2] if what == "arguments" else numbers[2:]
        room, data = end - begin, b""
        for text in sorted(texts, key=lambda text: not text.startswith("UNIDIST_")) if what != "arguments" else texts:
            said = os.fsencode(text) + b"\0"
            if len(data) + len(said) < room:
                data += said
        if begin and data:
            ctypes.memmove(begin, data.ljust(room, b"\0"), room)


if __name__ == "__main__":
    _run = serve(socket.socket(fileno=int(sys.argv[1])))
    _run()

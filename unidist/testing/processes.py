"""ProcessWorld: real Python processes that find each other as under a launcher, for tests.

    with ProcessWorld(2, launcher="torchrun", setup="my_tests.worlds:start") as world:
        results = world.call("my_tests.worlds:sum_of_ranks", 3)      # one result a process

The processes live as long as the world; each `call` runs one function in all of them at once.

Calls and results are pickled, and go over sockets without a name between a process and its own children: nobody else
can write there, and both ends already run each other's code. Nothing of it listens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, TypeAlias

from unidist.backends.environment import Launch, launchers, without_launcher
from unidist.launch.forkserver import Forked, ForkServer
from unidist.launch.request import LOOPBACK
from unidist.launch.request import free_port as free_port
from unidist.testing import forkserver

Target: TypeAlias = str | Callable[..., Any]
# Starts a process whose standard input is the first descriptor, and whose output the second.
Starter: TypeAlias = Callable[[int, int], subprocess.Popen[bytes] | Forked]

# One thread pool for each of many processes on few cores would spoil the world.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
_STDERR_KEPT = 4000
# Seconds that a debugger may take: it reads the symbols of a framework's libraries first.
_PATIENCE = 60.0
# Characters of what it prints that are kept.
_KEPT = 20_000
# Variables that no import reads: worlds that differ in them are forked from one server. (CUDA and XLA read theirs when
# devices are asked for.)
_NOT_OF_IMPORTS = ("PYTEST_", "UNIDIST_", "HOROVOD_", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS")


class ProcessFailedError(Exception):
    """A function failed in a process of the world, or the process ended or did not answer.

    Attributes:
        index: the process.
        kind: the name of the exception's type there; "ended" or "timeout" where there was none.
        message: the exception's text.
    """

    def __init__(self, index: int, count: int, kind: str, message: str, detail: str) -> None:
        super().__init__(f"process {index} of {count}: {kind}: {message}\n{detail}".rstrip())
        self.index = index
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what a call came to in one process: a value, or a failure."""

    value: Any = None
    failure: ProcessFailedError | None = None


def launcher_environment(launcher: str | None, count: int, index: int, port: int) -> dict[str, str]:
    """The variables that a launcher gives to process `index` of `count` on this machine."""
    if launcher is None:
        return {}
    launch = Launch(
        launcher=launcher,
        address=f"{LOOPBACK}:{port}",
        process_count=count,
        process_index=index,
        local_index=index,
    )
    return launchers()[launcher].variables(launch, local_count=count)


def target_name(target: Target) -> str:
    """ "module:function" of a target that another process can import."""
    if isinstance(target, str):
        return target
    if "<" in target.__qualname__ or target.__module__ == "__main__":
        raise ValueError(f"{target!r} cannot be imported by another process: give a module-level function")
    return f"{target.__module__}:{target.__qualname__}"


class ProcessWorld:
    """`count` Python processes on this machine that see a launcher's environment. A context manager.

    Args:
        count: number of processes.
        launcher: whose variables they see: "torchrun", "jax", the name of one that an adapter has declared, or None
            for none of them.
        env: further variables for all processes; None removes one.
        setup: "module:function" or a module-level function, called once in each process when it starts.
        setup_args: its arguments.
        timeout: seconds that one call (and starting with the setup) may take. Then every process is ended.
        preload: names of modules that the processes find imported, before their environment has a launcher's
            variables: they are forked from servers that stay (`unidist.testing.forkserver`). () for new ones.
        debugger: a process that does not answer in time is looked at by gdb, where it is installed: up to a minute.

    Processes start at `start()`, at the context's beginning, or at the first call. A call that leaves some process
    without an answer ends the world, and the next call starts a new one on another port: one hanging or killed
    check does not spoil the next.
    """

    def __init__(
        self,
        count: int,
        *,
        launcher: str | None = "torchrun",
        env: Mapping[str, str | None] | None = None,
        setup: Target | None = None,
        setup_args: tuple[Any, ...] = (),
        timeout: float = 120.0,
        preload: Sequence[str] = (),
        debugger: bool = False,
    ) -> None:
        self.count = count
        self.timeout = timeout
        self._launcher = launcher
        self._env = dict(env or {})
        self._setup = None if setup is None else target_name(setup)
        self._setup_args = setup_args
        self._preload = tuple(preload)
        self._debugger = debugger
        self._children: list[_Child] = []

    def __enter__(self) -> ProcessWorld:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the running processes, by index; () while the world is not started."""
        return tuple(child.process.pid for child in self._children)

    def start(self) -> None:
        """Starts the processes and runs the setup in each. Nothing where they run already.

        Raises:
            ProcessFailedError: the setup failed or took too long; all processes are ended then.
        """
        if self._children:
            return
        port = free_port()
        try:
            for index in range(self.count):
                own = launcher_environment(self._launcher, self.count, index, port)
                self._children.append(_Child(self._starter(index, own)))
            if self._setup is not None:
                _first_failure(self._outcomes(self._setup, self._setup_args, {}, self.timeout))
        except BaseException:
            self.close(patience=0.0)
            raise

    def call(self, target: Target, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs a function in every process at once; its results by process index.

        Args:
            target: "module:function" or a module-level function.
            args, kwargs: the same for every process; they and the results are pickled.

        Raises:
            ProcessFailedError: the first failure, with its traceback there.
        """
        outcomes = self.outcomes(target, *args, **kwargs)
        _first_failure(outcomes)
        return [outcomes[index].value for index in range(self.count)]

    def outcomes(self, target: Target, *args: Any, **kwargs: Any) -> dict[int, Outcome]:
        """As `call`, but what happened in each process, in the order in which it became known."""
        name = target_name(target)
        self.start()
        return self._outcomes(name, args, kwargs, self.timeout)

    def close(self, *, patience: float = 10.0) -> None:
        """Ends every process: asks, then after `patience` seconds kills. Leaves none behind."""
        children, self._children = self._children, []
        for child in children:
            child.send(None)
        deadline = time.monotonic() + patience
        for child in children:
            child.end(max(0.0, deadline - time.monotonic()))

    def _starter(self, index: int, own: Mapping[str, str]) -> Starter:
        env = self._environment(own)
        if not self._preload:
            return partial(_new_process, env)
        # pytest says there which test runs: a server serves them all.
        common = {name: value for name, value in self._environment({}).items() if not name.startswith(_NOT_OF_IMPORTS)}
        return partial(_forked, forkserver.server(common, self._preload, index % forkserver.TWINS), env)

    def _environment(self, own: Mapping[str, str]) -> dict[str, str]:
        env = _DEFAULTS | without_launcher(os.environ)
        env.pop("UNIDIST_BACKEND", None)
        env |= own
        for name, value in self._env.items():
            env.pop(name, None)
            if value is not None:
                env[name] = value
        return env

    def _outcomes(
        self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> dict[int, Outcome]:
        for child in self._children:
            child.send((target, args, kwargs))
        found: dict[int, Outcome] = {}
        waiting = {child.line: index for index, child in enumerate(self._children)}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for line in ready:
                index = waiting.pop(line)  # type: ignore[call-overload]
                found[index] = self._outcome(index, self._children[index].reply())
                if found[index].failure is not None:
                    # The others may wait for this one for ever: they get a little time to say what they see.
                    deadline = min(deadline, time.monotonic() + min(10.0, timeout))
        late = [index for index in range(self.count) if index not in found]
        for index in late:
            self._children[index].tell_where()
        for index in late:
            stacks = native_stacks(self._children[index].process.pid) if self._debugger else ""
            found[index] = Outcome(failure=self._failure(index, "timeout", "did not answer in time", stacks))
        if late or any(o.failure is not None and o.failure.kind == "ended" for o in found.values()):
            self.close(patience=0.0)
        return found

    def _outcome(self, index: int, reply: Any) -> Outcome:
        if reply is None:
            code = self._children[index].exit_code()
            return Outcome(failure=self._failure(index, "ended", f"the process ended with exit code {code}", ""))
        ok, content = reply
        return Outcome(value=content) if ok else Outcome(failure=self._failure(index, *content))

    def _failure(self, index: int, kind: str, message: str, trace: str) -> ProcessFailedError:
        printed = self._children[index].printed()
        detail = trace + (f"\nwhat it printed last:\n{printed}" if printed else "")
        return ProcessFailedError(index, self.count, kind, message, detail)


def _new_process(env: Mapping[str, str], stdin: int, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", forkserver.WORKER], stdin=stdin, stdout=output, stderr=output, env=env
    )


def _forked(server: ForkServer, env: Mapping[str, str], stdin: int, output: int) -> Forked:
    return server.fork(f"{forkserver.WORKER}:main", env, stdin, output, output, command=("-m", forkserver.WORKER))


class _Child:
    def __init__(self, start: Starter) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in end)
        self.line, theirs = Pipe()
        with theirs:
            self.process = start(theirs.fileno(), self._output.fileno())
        self.send(list(sys.path))

    def send(self, message: Any) -> None:
        """Sends to the process; of one that has ended no reply comes."""
        with contextlib.suppress(OSError):
            self.line.send(message)

    def reply(self) -> Any:
        """The reply to a call; None where the process has ended."""
        with contextlib.suppress(EOFError, OSError):
            return self.line.recv()
        return None

    def exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(5.0)
        return None

    def tell_where(self) -> None:
        """Asks a process that does not answer to print where each of its threads is."""
        if self.process.poll() is None and hasattr(signal, "SIGUSR1"):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)

    def printed(self) -> str:
        """The end of what it wrote to its standard output and error."""
        with contextlib.suppress(ValueError):
            self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, self._output.tell() - _STDERR_KEPT))
            return self._output.read().decode(errors="replace").strip()
        return ""

    def end(self, patience: float) -> None:
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.line.close()
        self._output.close()


def _first_failure(outcomes: Mapping[int, Outcome]) -> None:
    for outcome in outcomes.values():
        if outcome.failure is not None:
            raise outcome.failure


def native_stacks(pid: int) -> str:
    """Returns all threads' stacks of a process, by gdb; "" where there is no gdb, or it may not look."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return ""
    commands = ("-ex", "set print frame-arguments none", "-ex", "thread apply all bt 14")
    command = [gdb, "-p", str(pid), "-batch", "-nx", *commands]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    _, found, stacks = done.stdout.partition("\nThread ")
    return (found + stacks)[:_KEPT]

"""ForkServer: a process that has imported what many worlds need; their processes are forked from it.

Importing a framework costs seconds of a core in each process, forking a hundredth of one. A fork is made before any
framework has started a thread or opened a device, so it is as good as a new process, but for what is drawn once when
Python starts: processes of one server order their sets of strings alike. So a world takes them from two servers in
turn (`TWINS`), and ranks whose order of a set matters are found out.

Source of the method: CPython's multiprocessing.forkserver, which gives its children neither an environment nor
standard streams of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

# Servers that differ in the seed of Python's string hashes alone.
TWINS = 2
# Of those that nothing runs of: each holds some hundred megabytes. The least recently used one is ended first.
KEPT = 6
_LONGEST = 1 << 20
_READY, _STARTED, _ENDED = "ready", "started", "ended"

_servers: dict[tuple[Any, ...], ForkServer] = {}
_servers_lock = threading.Lock()


class ForkServer:
    """A process with modules imported, from which others are forked.

    Args:
        env: its environment, which what it imports sees.
        modules: what it imports.

    Raises:
        RuntimeError: it ended while it imported, or an import has started threads, so that forking is not safe.
    """

    def __init__(self, env: Mapping[str, str], modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], env=dict(env), pass_fds=(theirs.fileno(),)
            )
        self._one_at_a_time = threading.Lock()
        self._answered = threading.Condition()
        self._running: dict[int, Forked] = {}
        self._new: Forked | None = None
        self._is_gone = False
        self._socket.send(json.dumps({"path": sys.path, "modules": list(modules)}).encode())
        if not self._socket.recv(_LONGEST):
            code = self.process.wait()
            self._socket.close()
            raise RuntimeError(f"the fork server ended with exit code {code} while it imported {', '.join(modules)}")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def fork(self, env: Mapping[str, str], stdin: int, stdout: int, stderr: int) -> Forked:
        """A process with an environment and standard streams of its own, which runs `unidist.testing.worker`.

        Raises:
            RuntimeError: the server has ended.
        """
        message = json.dumps({"env": dict(env), "cwd": os.getcwd()}).encode()
        with self._one_at_a_time, self._answered:
            self._forget()
            with contextlib.suppress(OSError):
                socket.send_fds(self._socket, [message], [stdin, stdout, stderr])
            self._answered.wait_for(lambda: self._new is not None or self._is_gone)
            forked: Forked | None = self._new
            if forked is None:
                raise RuntimeError("the fork server is gone")
            return forked

    def _forget(self) -> None:
        self._new = None

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while message := self._socket.recv(_LONGEST):
                kind, pid, code = json.loads(message)
                with self._answered:
                    if kind == _STARTED:
                        self._new = self._running[pid] = Forked(pid)
                    else:
                        self._running.pop(pid).set_ended(code)
                    self._answered.notify_all()
        with self._answered:
            self._is_gone = True
            for forked in self._running.values():
                forked.set_ended(-signal.SIGKILL)
            self._answered.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was forked from it runs."""
        with self._answered:
            return not self._running

    def close(self) -> None:
        """Ends the server, and what was forked from it with it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.process.wait()
        self._reader.join()
        self._socket.close()


class Forked:
    """A process that a ForkServer has forked: what subprocess.Popen offers of one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self._ended = threading.Event()

    def set_ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout) or self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def server(env: Mapping[str, str], modules: Sequence[str], twin: int = 0) -> ForkServer:
    """The server with this environment and these modules, started at the first use and kept until `close_all`.

    Args:
        twin: 0 to TWINS - 1; servers that differ in it order sets of strings differently.
    """
    key = (frozenset(env.items()), tuple(modules), twin)
    with _servers_lock:
        found = _servers.pop(key, None) or ForkServer({**env, "PYTHONHASHSEED": str(1 + twin)}, modules)
        _servers[key] = found
        idle = [other for other, one in _servers.items() if one.is_idle and one is not found]
        for other in idle[: max(0, len(idle) - KEPT)]:
            _servers.pop(other).close()
        return found


def close_all() -> None:
    """Ends all servers of this process."""
    with _servers_lock:
        while _servers:
            _servers.popitem()[1].close()


atexit.register(close_all)


# in the server's process --------------------------------------------------------------------------------------------


def main(connection: socket.socket) -> None:
    """Imports what it is asked to, then forks until the other end is closed."""
    wanted = json.loads(connection.recv(_LONGEST))
    known = set(sys.path)
    sys.path += [entry for entry in wanted["path"] if entry not in known]
    for name in ("unidist.testing.worker", *wanted["modules"]):
        importlib.import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"importing {', '.join(wanted['modules'])} started {threads - 1} threads: do not preload it")
    # What is imported stays: collecting garbage in a child would copy its memory.
    gc.collect()
    gc.freeze()
    connection.send(json.dumps([_READY, os.getpid(), 0]).encode())
    _serve(connection)


def _serve(connection: socket.socket) -> None:
    wakes, wakened = socket.socketpair()
    wakened.setblocking(False)
    signal.set_wakeup_fd(wakened.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for source in (connection, wakes):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wakes:
                    wakes.recv(4096)
                    continue
                message, streams, _, _ = socket.recv_fds(connection, _LONGEST, 3)
                if not message:
                    for pid in running:
                        os.kill(pid, signal.SIGKILL)
                    return
                if not (pid := os.fork()):
                    selector.close()
                    for one in (connection, wakes, wakened):
                        one.close()
                    _become_worker(json.loads(message), streams)
                for stream in streams:
                    os.close(stream)
                running.add(pid)
                connection.send(json.dumps([_STARTED, pid, 0]).encode())
            _tell_ended(connection, running)


def _tell_ended(connection: socket.socket, running: set[int]) -> None:
    for pid in tuple(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            running.remove(pid)
            connection.send(json.dumps([_ENDED, pid, os.waitstatus_to_exitcode(status)]).encode())


def _become_worker(wanted: Mapping[str, Any], streams: Sequence[int]) -> None:
    """In the child: never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(wanted["env"])
        os.chdir(wanted["cwd"])
        _draw_anew()
        from unidist.testing import worker

        worker.main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _end(code)


def _draw_anew() -> None:
    """NumPy draws its first seed when it is imported; Python's own generator does this by itself after a fork."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _end(code: int) -> None:
    """As an interpreter ends: threads are joined, what is registered is called, streams are flushed."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))

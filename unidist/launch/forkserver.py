"""ForkServer: a process that has imported what others need; they are forked from it.

Importing a framework costs seconds of a core in each process, forking a hundredth of one. A fork is made before any
framework has started a thread or opened a device, so it is as good as a new process, but for what is drawn once when
Python starts: processes of one server order their sets of strings alike.

Source of the method: CPython's multiprocessing.forkserver, which gives its children neither an environment nor
standard streams of their own. Those of this one look from outside as if they had been started (forking.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unidist.launch import forking

# What forked processes show of themselves has the room of what the server was started with.
_ROOM, _ARGUMENTS = {"UNIDIST_ROOM": " " * 4096}, " " * 2048


@dataclass(frozen=True, slots=True)
class Program:
    """A program that has run, as a server is to know what its processes need.

    Attributes:
        told: the file in which a process of it says what it has imported, and from where (flight/recorder.py).
        folder: where it looks for modules before all other places.
        frameworks: top-level packages that are imported, so far as it has imported them.
    """

    told: Path
    folder: str
    frameworks: Sequence[str]


class ForkServer:
    """A process with modules imported, from which others are forked.

    Args:
        env: its environment, which what it imports sees.
        modules: what it imports.
        path: where it looks for modules besides.
        program: imports what that has imported, in the background: at a low priority, in a session of its own and
            without a word.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        modules: Sequence[str] = (),
        *,
        path: Sequence[str] = (),
        program: Program | None = None,
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent = None if program is None else subprocess.DEVNULL
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, forking.__file__, str(theirs.fileno()), _ARGUMENTS],
                env={**env, **_ROOM},
                pass_fds=(theirs.fileno(),),
                stdin=silent,
                stdout=silent,
                stderr=silent,
                start_new_session=program is not None,
            )
        self._in_sessions = program is not None
        self._what = ", ".join(modules) or "what the program has imported"
        self._one_at_a_time = threading.Lock()
        self._running: dict[int, Forked] = {}
        # In the order of the calls; None once the server is gone.
        self._started: queue.SimpleQueue[Forked | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        wanted = {
            "path": list(path),
            "modules": list(modules),
            "told": None if program is None else str(program.told),
            "folder": "" if program is None else program.folder,
            "frameworks": [] if program is None else list(program.frameworks),
        }
        self._socket.send(json.dumps(wanted).encode())

    def wait(self) -> None:
        """Returns when it has imported.

        Raises:
            RuntimeError: it ended while it imported, or forking is not safe after that: an import has started threads
                or opened a device, or would find something else in the program.
        """
        answer = b""
        with contextlib.suppress(OSError):
            answer = self._socket.recv(forking.LONGEST)
        kind, _, why = json.loads(answer) if answer else ("", 0, "")
        if kind == forking.READY:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
            return
        code = self.process.wait()
        raise RuntimeError(why or f"the fork server ended with exit code {code} while it imported {self._what}")

    def fork(
        self,
        target: str,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        *,
        arguments: Sequence[object] = (),
        command: Sequence[str] = (),
    ) -> Forked:
        """A process with an environment and standard streams of its own.

        Args:
            target: "module:function" or "/path/of/a/file.py:function", which it runs.
            arguments: of the function.
            command: what it shows as its command, after the interpreter's name.

        Raises:
            RuntimeError: the server has ended.
        """
        wanted = {
            "target": target,
            "arguments": list(arguments),
            "command": list(command),
            "env": dict(env),
            "cwd": os.getcwd(),
            "session": self._in_sessions,
        }
        with self._one_at_a_time:
            with contextlib.suppress(OSError):
                socket.send_fds(self._socket, [json.dumps(wanted).encode()], [stdin, stdout, stderr])
            if (forked := self._started.get()) is None:
                self._started.put(None)
                raise RuntimeError("the fork server is gone")
            return forked

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while message := self._socket.recv(forking.LONGEST):
                kind, pid, code = json.loads(message)
                if kind == forking.STARTED:
                    forked = self._running[pid] = Forked(pid)
                    self._started.put(forked)
                else:
                    self._running.pop(pid).set_ended(code)
        for forked in self._running.values():
            forked.set_ended(-signal.SIGKILL)
        self._started.put(None)

    @property
    def is_idle(self) -> bool:
        """Is true where nothing that was forked from it runs."""
        return not self._running

    def close(self) -> None:
        """Ends the server, and what was forked from it with it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader is None:
            self.process.kill()
        self.process.wait()
        if self._reader is not None:
            self._reader.join()
        self._socket.close()


class Forked:
    """A process that a ForkServer has forked: what subprocess.Popen offers of one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
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

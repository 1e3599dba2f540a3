"""Starts processes, new ones or forked from a server.

Here is what all jobs share, and those of each framework. An adapter's entry names its job.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unidist.backends import registry
from unidist.backends.environment import TORCHRUN, Launch, without_launcher
from unidist.launch import counting, program
from unidist.launch.console import Console
from unidist.launch.forkserver import Forked, ForkServer
from unidist.launch.request import LOOPBACK, LaunchError, Request, free_port, listening, split_address

_STORE = Path(registry.__file__).parent / "torch" / "store.py"
# What torchrun would call a run and what it starts.
_NAME = "unidist"
# Run by path and with -P: a module in the folder where the user stands must not shadow what the server imports.
_RENDEZVOUS = Path(registry.__file__).parent / "horovod" / "rendezvous.py"
_log = logging.getLogger("unidist.launch")


@dataclass(frozen=True, slots=True)
class Failure:
    """A process that failed. `exit_code` is below 0 if a signal ended it; `rank` is None for one beside."""

    rank: int | None
    exit_code: int


class Job(ABC):
    """The processes of one node, as the launcher sees them.

    Attributes:
        forks: what processes are forked from where that can be; None: they are new ones.
        restarts: how often the run was started again.

    Raises:
        LaunchError: several devices are asked for in each process of an adapter that has one.
    """

    def __init__(self, request: Request) -> None:
        if request.devices_per_process is not None and registry.entry(request.backend).one_device:
            raise LaunchError(
                f"{request.backend} has one device a process: start more processes (-n) instead of "
                "--devices-per-process"
            )
        self.request = request
        self.forks: ForkServer | None = None
        self.restarts = 0
        self._children: list[subprocess.Popen[bytes] | Forked] = []
        # A server at which they meet.
        self._beside: subprocess.Popen[bytes] | Forked | None = None
        self._lifeline: tuple[int, int] | None = None

    def defaults(self) -> dict[str, str]:
        """Returns variables for all processes, unless the environment differs: they share the usable cores."""
        return {"OMP_NUM_THREADS": str(max(1, counting.cores() // self.request.processes))}

    def common(self) -> dict[str, str]:
        """Returns what the job adds to the environment of each process alike, whatever the attempt."""
        return self.defaults()

    @abstractmethod
    def start(self, environ: Mapping[str, str], console: Console) -> None:
        """Starts the processes, each in a process group of its own."""

    @abstractmethod
    def poll(self) -> list[Failure] | None:
        """None while all is well and something runs, [] when all ended well, else what has failed so far."""

    def done(self) -> list[int]:
        """Ranks whose processes have ended with exit code 0."""
        return []

    def groups(self) -> list[int]:
        """The process groups that were made; a group whose leader has been reaped may still have members."""
        return [process.pid for process in self._processes()]

    def running(self) -> bool:
        return None in [process.poll() for process in self._processes()]

    def at_work(self) -> bool:
        """Says whether a rank runs. A server at which they meet would run on behind them."""
        return None in [child.poll() for child in self._children]

    def _processes(self) -> list[subprocess.Popen[bytes] | Forked]:
        return [*self._children, *([] if self._beside is None else [self._beside])]

    def close(self) -> None:
        """Gives back what the job itself holds, once nothing of it runs."""
        for descriptor in self._lifeline or ():
            os.close(descriptor)
        self._lifeline = None

    def _standard_input(self) -> int:
        """Returns the reading end of the lifeline, for all processes of the job.

        No other process gets the writing end.
        """
        if self._lifeline is None:
            self._lifeline = os.pipe()
        return self._lifeline[0]


class LocalProcesses(Job):
    """Starts one process each, with the variables of the adapter's launcher, or torchrun's.

    With those process 0 meets the others.
    """

    def start(self, environ: Mapping[str, str], console: Console) -> None:
        address = self.request.address or f"{LOOPBACK}:{free_port()}"
        self._start_each({**self.defaults(), **environ}, self._variables(address), console)

    def common(self) -> dict[str, str]:
        first, *others = [without_launcher(one) for one in self._variables(f"{LOOPBACK}:1")]
        same = {name: value for name, value in first.items() if all(one.get(name) == value for one in others)}
        return {**self.defaults(), **same}

    def _variables(self, address: str) -> list[dict[str, str]]:
        return [self.variables(address, local_index) for local_index in range(self.request.processes)]

    def variables(self, address: str, local_index: int) -> dict[str, str]:
        """For one process."""
        request = self.request
        launcher = registry.entry(request.backend).launcher or TORCHRUN
        launch = Launch(
            launcher=launcher.name,
            address=address,
            process_count=request.world_size,
            process_index=request.rank(local_index),
            local_index=local_index,
        )
        return launcher.variables(launch, local_count=request.processes)

    def _start_each(self, environ: Mapping[str, str], variables: Sequence[Mapping[str, str]], console: Console) -> None:
        for local_index, own in enumerate(variables):
            out, err = console.attach(self.request.rank(local_index))
            command = self.request.command
            try:
                self._children.append(
                    self._process(program.__file__, command, [list(command)], {**environ, **own}, out, err)
                )
            finally:
                os.close(out)
                os.close(err)

    def _process(
        self,
        file: str,
        command: Sequence[str],
        arguments: Sequence[object],
        environ: Mapping[str, str],
        out: int,
        err: int | None,
    ) -> subprocess.Popen[bytes] | Forked:
        given = {**environ, program.LIFELINE: "stdin"}
        stdin = self._standard_input()
        if self.forks is not None:
            try:
                return self.forks.fork(
                    f"{file}:main",
                    given,
                    stdin,
                    out,
                    2 if err is None else err,
                    arguments=arguments,
                    command=[file, *command],
                )
            except RuntimeError as error:
                _log.info("starting new processes: %s", error)
                self.forks = None
        return subprocess.Popen(
            [sys.executable, file, *command], env=given, stdin=stdin, stdout=out, stderr=err, start_new_session=True
        )

    def poll(self) -> list[Failure] | None:
        codes = [child.poll() for child in self._children]
        failures = [Failure(self.request.rank(i), code) for i, code in enumerate(codes) if code]
        return failures if failures or None not in codes else None

    def done(self) -> list[int]:
        return [self.request.rank(i) for i, child in enumerate(self._children) if child.poll() == 0]


class TorchProcesses(LocalProcesses):
    """torch: as torchrun's agent would start them, but without waiting for it.

    The agent imports torch before it starts anything, and cannot be forked. What is left of it is the store at which
    the processes meet, in a process beside those of node 0: torch's own, in process 0, would listen at every interface.
    """

    def start(self, environ: Mapping[str, str], console: Console) -> None:
        given = {**self.defaults(), **environ}
        address = self.request.address
        if self.request.node_rank:
            assert address is not None
            self._start_each(given, self._variables(address), console)
            return
        # Processes that come before the store listens are kept waiting by the socket.
        with listening(*(split_address(address) if address else (LOOPBACK, 0))) as server:
            self._start_each(given, self._variables(address or f"{LOOPBACK}:{server.getsockname()[1]}"), console)
            self._beside = self._process(
                str(_STORE), [program.__file__], [program.__file__], given, server.fileno(), None
            )

    def variables(self, address: str, local_index: int) -> dict[str, str]:
        request = self.request
        return {
            **super().variables(address, local_index),
            **{"GROUP_RANK": str(request.node_rank), "GROUP_WORLD_SIZE": str(request.nodes)},
            **{"ROLE_RANK": str(request.rank(local_index)), "ROLE_WORLD_SIZE": str(request.world_size)},
            "ROLE_NAME": _NAME,
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(request.max_restarts),
            "TORCHELASTIC_RUN_ID": _NAME,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def poll(self) -> list[Failure] | None:
        found = super().poll()
        if found is None and self._beside is not None and (code := self._beside.poll()) is not None:
            return [Failure(None, code or 1)]
        return found


class JaxProcesses(LocalProcesses):
    """JAX: its coordinator is in process 0, and a process may have several devices."""

    def defaults(self) -> dict[str, str]:
        # JAX's preemption service would keep the SIGTERM, with which the launcher ends processes, for itself.
        return {"JAX_ENABLE_PREEMPTION_SERVICE": "false"}

    def variables(self, address: str, local_index: int) -> dict[str, str]:
        request, variables = self.request, super().variables(address, local_index)
        if request.nodes == 1:
            # JAX's default is every interface of the machine.
            variables["JAX_COORDINATOR_BIND_ADDRESS"] = address
        count = request.devices_per_process
        if count is not None:
            variables["JAX_NUM_CPU_DEVICES"] = str(count)
        if count is not None or request.processes > 1:
            # Without it every process takes all accelerators of the node. Virtual CPU devices do not look at it.
            first = local_index * (count or 1)
            variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(first + k) for k in range(count or 1))
        return variables


class Clients(LocalProcesses):
    """TensorFlow: DTensor's clients, which may have several devices."""

    def defaults(self) -> dict[str, str]:
        return {}

    def variables(self, address: str, local_index: int) -> dict[str, str]:
        count = self.request.devices_per_process
        own = {} if count is None else {"UNIDIST_CPU_DEVICES": str(count)}
        return {**super().variables(address, local_index), **own}


class HorovodProcesses(LocalProcesses):
    """Horovod: starts one process each. They meet at a rendezvous server of Horovod's own beside them."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._server: subprocess.Popen[bytes] | None = None
        self._environ: Mapping[str, str] = {}
        self._console: Console | None = None

    def start(self, environ: Mapping[str, str], console: Console) -> None:
        """Starts the server; the processes follow when it says where it is (node 0) or has found node 0's."""
        request = self.request
        host, port = split_address(request.address) if request.address else (LOOPBACK, 0)
        task = {
            "host": host,
            "port": port,
            "hosts": request.nodes,
            "host_number": request.node_rank,
            "per_host": request.processes,
        }
        self._environ, self._console = {**self.defaults(), **environ}, console
        self._beside = self._server = subprocess.Popen(
            [sys.executable, "-P", str(_RENDEZVOUS), json.dumps(task)],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def poll(self) -> list[Failure] | None:
        server, console = self._server, self._console
        if server is None or server.stdout is None or console is None:
            return None
        if self._children:
            return super().poll()
        if not select.select([server.stdout], [], [], 0)[0]:
            return None
        line = server.stdout.readline()
        if not line:
            return [Failure(None, server.wait() or 1)]
        self._start_each(self._environ, json.loads(line), console)
        return None

    def close(self) -> None:
        if self._server is not None:
            for stream in (self._server.stdin, self._server.stdout):
                if stream is not None:
                    stream.close()
        super().close()

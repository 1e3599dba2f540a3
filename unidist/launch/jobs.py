"""The two ways in which processes are started: by ourselves (JAX, TensorFlow), and by torchrun's elastic agent (torch)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from unidist.backends import registry
from unidist.launch import program
from unidist.launch.console import Console
from unidist.launch.request import LOOPBACK, LaunchError, Request, free_port

# Run by path and with -P: a module in the folder where the user stands must not shadow what the agent imports.
_AGENT = Path(registry.__file__).parent / "torch" / "agent.py"
# JAX's preemption service would keep the SIGTERM, with which the launcher ends processes, for itself.
_DEFAULTS = {"JAX_ENABLE_PREEMPTION_SERVICE": "false"}


@dataclass(frozen=True, slots=True)
class Failure:
    """A process that failed. `exit_code` is negative where a signal ended it; `rank` is None for the agent itself."""

    rank: int | None
    exit_code: int


class Job(ABC):
    """The processes of one node, as the launcher sees them."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._children: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self, environ: Mapping[str, str], console: Console) -> None:
        """Starts the processes, each in a process group of its own."""

    @abstractmethod
    def poll(self) -> list[Failure] | None:
        """None while all is well and something runs, [] when all ended well, else what failed."""

    def groups(self) -> list[int]:
        """The process groups that were made; a group whose leader has been reaped may still have members."""
        return [child.pid for child in self._children]

    def running(self) -> bool:
        return None in [child.poll() for child in self._children]

    def close(self) -> None:
        """Gives back what the job itself holds, once nothing of it runs."""
        return


class LocalProcesses(Job):
    """JAX: one process each, which meet at the coordinator in process 0."""

    def start(self, environ: Mapping[str, str], console: Console) -> None:
        address = self.request.address or f"{LOOPBACK}:{free_port()}"
        for local_index in range(self.request.processes):
            out, err = console.attach(self.request.rank(local_index))
            try:
                self._children.append(
                    subprocess.Popen(
                        [sys.executable, program.__file__, *self.request.command],
                        env={**_DEFAULTS, **environ, **self._variables(address, local_index)},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )
            finally:
                os.close(out)
                os.close(err)

    def _variables(self, address: str, local_index: int) -> dict[str, str]:
        request = self.request
        variables = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(request.world_size),
            "JAX_PROCESS_ID": str(request.rank(local_index)),
            "JAX_LOCAL_PROCESS_ID": str(local_index),
        }
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

    def poll(self) -> list[Failure] | None:
        codes = [child.poll() for child in self._children]
        failures = [Failure(self.request.rank(i), code) for i, code in enumerate(codes) if code]
        return failures if failures or None not in codes else None


class Clients(LocalProcesses):
    """TensorFlow: as JAX's processes, told by torchrun's variables, with which its adapter lets them meet."""

    def _variables(self, address: str, local_index: int) -> dict[str, str]:
        request = self.request
        host, _, port = address.rpartition(":")
        variables = {
            "RANK": str(request.rank(local_index)),
            "WORLD_SIZE": str(request.world_size),
            "LOCAL_RANK": str(local_index),
            "LOCAL_WORLD_SIZE": str(request.processes),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        if request.devices_per_process is not None:
            variables["UNIDIST_CPU_DEVICES"] = str(request.devices_per_process)
        return variables


class ElasticAgent(Job):
    """torch: torchrun's agent, in a process of its own, starts the others and tells how they ended."""

    def __init__(self, request: Request) -> None:
        if request.devices_per_process is not None:
            raise LaunchError(
                "torch has one device a process: start more processes (-n) instead of --devices-per-process"
            )
        super().__init__(request)
        self._verdict: BinaryIO | None = None

    def start(self, environ: Mapping[str, str], console: Console) -> None:
        request = self.request
        streams = [console.attach(request.rank(local_index)) for local_index in range(request.processes)]
        reading, verdict = os.pipe()
        self._verdict = os.fdopen(reading, "rb")
        task = {**asdict(request), "streams": streams, "verdict": verdict}
        passed = [verdict, *(descriptor for pair in streams for descriptor in pair)]
        try:
            self._children.append(
                subprocess.Popen(
                    [sys.executable, "-P", str(_AGENT), json.dumps(task)],
                    env={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // request.processes)), **environ},
                    stdin=subprocess.DEVNULL,
                    pass_fds=passed,
                    start_new_session=True,
                )
            )
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def poll(self) -> list[Failure] | None:
        code = self._children[0].poll()
        if code is None or self._verdict is None:
            return None
        verdict = self._verdict.read()
        if not verdict:
            return [Failure(None, code or 1)]
        return [Failure(rank, exit_code) for rank, exit_code in json.loads(verdict)]

    def close(self) -> None:
        if self._verdict is not None:
            self._verdict.close()


JOBS: dict[str, type[Job]] = {"torch": ElasticAgent, "jax": LocalProcesses, "tensorflow": Clients}

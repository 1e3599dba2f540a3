"""How torch's processes start: by torchrun's elastic agent, or by ourselves around the agent's store alone, where they
may be started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from unidist.backends import registry
from unidist.launch import program
from unidist.launch.console import Console
from unidist.launch.forkserver import Forked
from unidist.launch.jobs import Failure, Job, LocalProcesses
from unidist.launch.request import LOOPBACK, Request, listening, split_address

# Run by path and with -P: a module in the folder where the user stands must not shadow what the agent imports.
_AGENT = Path(registry.__file__).parent / "torch" / "agent.py"
_STORE = Path(registry.__file__).parent / "torch" / "store.py"
# What torchrun's agent calls a run and what it starts.
_NAME = "unidist"


class TorchProcesses(LocalProcesses):
    """torch, where processes may be started again: as torchrun's agent would start them, but without waiting for it.

    The agent imports torch before it starts anything, and cannot be forked. What is left of it is the store at which
    the processes meet, in a process beside those of node 0: torch's own, in process 0, would listen at every interface.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._store: subprocess.Popen[bytes] | Forked | None = None

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
            self._store = self._process(
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
        if found is None and self._store is not None and (code := self._store.poll()) is not None:
            return [Failure(None, code or 1)]
        return found

    def groups(self) -> list[int]:
        return [*super().groups(), *([] if self._store is None else [self._store.pid])]

    def running(self) -> bool:
        return super().running() or (self._store is not None and self._store.poll() is None)


class ElasticAgent(Job):
    """torch: torchrun's agent, in a process of its own, starts the others and reports which of them have failed."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._told: BinaryIO | None = None
        self._ends = b""

    def start(self, environ: Mapping[str, str], console: Console) -> None:
        request = self.request
        streams = [console.attach(request.rank(local_index)) for local_index in range(request.processes)]
        reading, telling = os.pipe()
        os.set_blocking(reading, False)
        self._told = os.fdopen(reading, "rb", buffering=0)
        task = {**asdict(request), "streams": streams, "ends": telling, "program": program.__file__}
        passed = [telling, *(descriptor for pair in streams for descriptor in pair)]
        try:
            self._children.append(
                subprocess.Popen(
                    [sys.executable, "-P", str(_AGENT), json.dumps(task)],
                    env={**self.defaults(), **environ, program.LIFELINE: "stdin"},
                    stdin=self._standard_input(),
                    pass_fds=passed,
                    start_new_session=True,
                )
            )
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def poll(self) -> list[Failure] | None:
        if self._told is None:
            return None
        # Asked before reading: what an agent that has ended reported is then all there.
        code = self._children[0].poll()
        while more := self._told.read(4096):
            self._ends += more
        failures = [Failure(rank, code) for rank, code in self._ended() if code]
        if code and not failures:
            return [Failure(None, code)]
        return failures if failures or code is not None else None

    def done(self) -> list[int]:
        return [rank for rank, code in self._ended() if code == 0]

    def _ended(self) -> list[tuple[int, int]]:
        """(rank, exit code) of those that the agent has reported."""
        return [tuple(json.loads(line)) for line in self._ends.split(b"\n")[:-1]]

    def close(self) -> None:
        if self._told is not None:
            self._told.close()
        super().close()


def of_torch(request: Request) -> Job:
    """torchrun's agent, unless processes may be started again."""
    return TorchProcesses(request) if request.max_restarts else ElasticAgent(request)

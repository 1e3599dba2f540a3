"""Starts torch's processes as torchrun's elastic agent would start them, around a store of its kind."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from unidist.backends import registry
from unidist.launch import program
from unidist.launch.console import Console
from unidist.launch.forkserver import Forked
from unidist.launch.jobs import Failure, LocalProcesses
from unidist.launch.request import LOOPBACK, Request, listening, split_address

_STORE = Path(registry.__file__).parent / "torch" / "store.py"
# What torchrun would call a run and what it starts.
_NAME = "unidist"


class TorchProcesses(LocalProcesses):
    """torch: as torchrun's agent would start them, but without waiting for it.

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

"""torchrun's elastic agent as `unidist run` uses it: a process that starts one node's workers and reports their ends.

    python -P .../agent.py '{"command": ["train.py"], "processes": 2, ...}'

Run by path: imports no unidist. The task is a launch request plus `streams` (for each local rank the descriptors of its
standard output and error), `ends` (the descriptor on which a line [rank, exit code] is written for each worker that
has ended, as soon as it has) and `program` (the path of what runs the command in each worker). The others go on:
who started this process ends them, and it. The standard input is that one's lifeline, here and in the workers.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TextIO

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not by name
from torch.distributed.elastic.multiprocessing import SubprocessContext, api
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, launch_agent

_LOOPBACK, _OURS = "127.0.0.1", "unidist-loopback"
_ELASTIC = "torch.distributed.elastic"
# The signals that torch makes exceptions of.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# What torch's static rendezvous waits.
_SECONDS = 600


class Descriptors(LogsSpecs):
    """Sends each worker's output to descriptors that this process was given."""

    def __init__(self, streams: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._streams = streams

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for variables in envs.values():
            variables["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts={local: f"/dev/fd/{out}" for local, (out, _) in enumerate(self._streams)},
            stderrs={local: f"/dev/fd/{err}" for local, (_, err) in enumerate(self._streams)},
            error_files=dict.fromkeys(envs, os.devnull),
        )


class Loopback(StaticTCPRendezvous):
    """One node's rendezvous: a store that listens at the loopback alone, where torch's own listen everywhere.

    Nor does it unpickle what others write there, as torchrun's usual one does.
    """

    def __init__(self, run_id: str) -> None:
        with socket.create_server((_LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            super().__init__(_LOOPBACK, port, 0, 1, run_id, _SECONDS)
            self._store = TCPStore(
                _LOOPBACK, port, 1, True, self.timeout, multi_tenant=True, master_listen_fd=server.detach()
            )

    def get_backend(self) -> str:
        return _OURS


def configuration(task: dict[str, Any]) -> LaunchConfig:
    """One node: at a free port of the loopback. Several: they meet at node 0's address, ranked as asked."""
    several = task["nodes"] > 1
    return LaunchConfig(
        min_nodes=task["nodes"],
        max_nodes=task["nodes"],
        nproc_per_node=task["processes"],
        run_id="unidist",
        role="unidist",
        rdzv_backend="static" if several else _OURS,
        rdzv_endpoint=task["address"] if several else "",
        rdzv_configs={"rank": task["node_rank"]} if several else {},
        local_addr=None if several else _LOOPBACK,
        logs_specs=Descriptors(task["streams"]),
        max_restarts=0,
        monitor_interval=0.05,
        shutdown_timeout=max(1, round(task["grace"])),
    )


def sent_again(lost: sys.UnraisableHookArgs) -> None:
    """A signal's exception that was raised where none goes on, as in a weakref's callback: the signal comes again."""
    if isinstance(lost.exc_value, SignalException):
        threading.Timer(0.05, os.kill, (os.getpid(), lost.exc_value.sigval)).start()
    else:
        sys.__unraisablehook__(lost)


def run_agent(task: dict[str, Any]) -> None:
    """Until all workers have ended. Raises ChildFailedError if one failed, and what a signal's handler raises."""
    launch_agent(configuration(task), sys.executable, [task["program"], *task["command"]])


def noting(handler: Callable[..., None], came: list[int]) -> Callable[..., None]:
    """torch's handler of signals. Its exception may come out as another one, where it was raised within a call in C.

    It raises within `run_agent` alone. Afterwards all is ended in any case, and nobody would catch what it raises.
    """

    def handling(number: int, frame: FrameType | None) -> None:
        came.append(number)
        inner = frame
        while inner is not None and inner.f_code is not run_agent.__code__:
            inner = inner.f_back
        if inner is not None:
            handler(number, frame)

    return handling


def telling(
    wait: Callable[..., RunProcsResult | None], first_rank: int, stream: TextIO
) -> Callable[..., RunProcsResult | None]:
    """The workers' `wait`, which would end all at the first failure and so hide which was the cause."""
    told: set[int] = set()

    def waiting(workers: SubprocessContext, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        codes = {local: handler.proc.poll() for local, handler in workers.subprocess_handlers.items()}
        for local in [local for local, code in codes.items() if code is not None and local not in told]:
            told.add(local)
            print(json.dumps([first_rank + local, codes[local]]), file=stream, flush=True)
        return None if None in codes.values() else wait(workers, timeout, period)

    return waiting


def main(task: dict[str, Any]) -> int:
    runpy.run_path(task["program"])["watch"](sys.stdin.fileno())
    sys.unraisablehook = sent_again
    # Each of its modules has given its logger a level of its own.
    for name in [_ELASTIC, *(name for name in logging.root.manager.loggerDict if name.startswith(f"{_ELASTIC}."))]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # A signal that arrives while the agent logs would otherwise print a "Logging error" with a traceback of its own.
    logging.raiseExceptions = False
    rendezvous_handler_registry.register(_OURS, lambda parameters: Loopback(parameters.run_id))
    came: list[int] = []
    api._terminate_process_handler = noting(api._terminate_process_handler, came)
    with os.fdopen(task["ends"], "w") as stream:
        first_rank = task["node_rank"] * task["processes"]
        SubprocessContext.wait = telling(SubprocessContext.wait, first_rank, stream)  # type: ignore[method-assign]
        try:
            run_agent(task)
        except ChildFailedError:
            return 0
        except BaseException:
            if not came:
                raise
            return 128 + came[0]
        finally:
            # Python's exit gives signals their usual meaning back, which would replace the exit code.
            for one in _ENDING:
                signal.signal(one, signal.SIG_IGN)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

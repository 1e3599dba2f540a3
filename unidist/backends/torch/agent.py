"""torchrun's elastic agent as `unidist run` uses it: a process that starts one node's workers and tells how they ended.

    python -P .../agent.py '{"command": ["train.py"], "processes": 2, ...}'

Run by path: imports no unidist. The task is a launch request plus `streams` (for each local rank the descriptors of its
standard output and error) and `verdict` (the descriptor on which [[rank, exit code], ...] of the failed workers is
written at the end).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent


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


def configuration(task: dict[str, Any]) -> LaunchConfig:
    """One node: the agent finds a free port by itself. Several: they meet at node 0's address, ranked as told."""
    several = task["nodes"] > 1
    return LaunchConfig(
        min_nodes=task["nodes"],
        max_nodes=task["nodes"],
        nproc_per_node=task["processes"],
        run_id="unidist",
        role="unidist",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=task["address"] if several else "localhost:0",
        rdzv_configs={"rank": task["node_rank"]} if several else {},
        local_addr=None if several else "127.0.0.1",
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


def main(task: dict[str, Any]) -> int:
    sys.unraisablehook = sent_again
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # A signal that arrives while the agent logs would otherwise print a "Logging error" with a traceback of its own.
    logging.raiseExceptions = False
    failed: list[tuple[int, int]] = []
    try:
        launch_agent(configuration(task), sys.executable, list(task["command"]))
    except ChildFailedError as error:
        failed = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
    except SignalException as error:
        return 128 + error.sigval
    with os.fdopen(task["verdict"], "w") as stream:
        json.dump(failed, stream)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

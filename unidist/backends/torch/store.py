"""Serves the store of one node's torch processes, which `unidist run` starts without torchrun's agent.

    python .../store.py PROGRAM

Run by path: imports no unidist. The standard output is a socket that listens at the loopback, the standard input the
lifeline that PROGRAM (launch/program.py) knows how to watch.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
from datetime import timedelta

# What torch's own rendezvous waits.
_TIMEOUT = timedelta(seconds=600)


def main(program: str) -> None:
    runpy.run_path(program)["watch"](0)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not by name

    with socket.socket(fileno=os.dup(1)) as listening:
        host, port = listening.getsockname()
        store = TCPStore(host, port, 1, True, _TIMEOUT, multi_tenant=True, master_listen_fd=listening.detach())
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])

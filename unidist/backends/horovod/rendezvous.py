"""Horovod's rendezvous server, at an address known beforehand, and what processes learn of it.

Run by path it serves one node of `unidist run` and imports no unidist:

    python -P .../rendezvous.py '{"host": "127.0.0.1", "port": 0, "hosts": 1, "host_number": 0, "per_host": 4}'

Once its processes may start it prints the environment of each (port 0: a free one); it ends when its standard input
ends. Host number 0 serves, the others wait until it does.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from http import HTTPStatus
from typing import Any

import psutil
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

_REACH_SECONDS = 300.0


def slots(hosts: int, per_host: int) -> list[SlotInfo]:
    """Returns the places of a world of `hosts` times `per_host` processes.

    A host's name is its number: nobody looks it up.
    """
    return [
        SlotInfo(f"host{host}", host * per_host + local, local, host, hosts * per_host, per_host, hosts)
        for host in range(hosts)
        for local in range(per_host)
    ]


class Handler(RendezvousHandler):  # type: ignore[misc]
    """Horovod's, which forgets a scope once all its processes have met there: another world may then meet.

    Horovod 0.28.1 counts anew in all scopes where one is done. Addresses of a world that was left stay then, and who
    joins the next one may find them.
    """

    def do_DELETE(self) -> None:  # noqa: N802 (http.server's name)
        scope, _, key = self.path.removeprefix("/").partition("/")
        server = self.server
        if scope not in server.scope_size:
            super().do_DELETE()
            return
        with server.finished_list_lock:
            done = server.finished_list[scope]
            done.append(key)
            if len(done) == server.scope_size[scope]:
                done.clear()
                with server.cache_lock:
                    server.cache.pop(scope, None)
        self.send_status_code(HTTPStatus.OK)


def serve(host: str, port: int, world: list[SlotInfo]) -> RendezvousHTTPServer:
    """Starts a server that answers in a thread of its own until the process ends.

    Raises OSError where the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("Server", (RendezvousHTTPServer,), {"address_family": family, "daemon_threads": True})
    server = kind((host, port), Handler, 0)
    server.init(world)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def variables(slot: SlotInfo, host: str, port: int) -> dict[str, str]:
    """Returns the variables that horovodrun would give to the process of that slot."""
    known = {**create_slot_env_vars(slot), **create_run_env_vars(host, [interface(host)], port)}
    return {name: str(value) for name, value in known.items()}


def interface(host: str) -> str:
    """The name of this machine's network interface that leads to a host."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return str(name)
    raise OSError(f"no network interface of this machine has the address {own}, from which {host} is reached")


def wait_for(host: str, port: int, seconds: float) -> None:
    """Returns once somebody listens there. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody answers at {host}:{port} ({error})") from error
            time.sleep(0.1)


def main(task: dict[str, Any]) -> int:
    host, port = task["host"], task["port"]
    world = slots(task["hosts"], task["per_host"])
    try:
        if task["host_number"] == 0:
            port = serve(host, port, world).server_address[1]
        else:
            wait_for(host, port, _REACH_SECONDS)
        own = [slot for slot in world if slot.cross_rank == task["host_number"]]
        known = [variables(slot, host, port) for slot in own]
    except OSError as error:  # TimeoutError too
        print(f"unidist: Horovod's rendezvous at {host}:{port}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(known), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

"""Hosts: network namespaces that stand for machines, joined by a cable that can be cut. For root, with iproute2.

    with Hosts(2) as hosts:
        process = subprocess.Popen([*hosts.prefix(1), "python", ...])     # on host 1
        hosts.cut(1)
        hosts.mend(1)
        hosts.slow(1, 0.2)

Each host has a loopback, and an interface "net0" with the address 10.77.N.(host + 1), and one of IPv6. The machine's
name leads there. They meet on a bridge in a namespace of its own. A cable that is cut loses what is sent, and says
nothing. One that is slow brings it later.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_numbers = itertools.count()
# What is below it is laid over /etc in a namespace: man 8 ip-netns.
_OVER_ETC = Path("/etc/netns")
_SLOW = Path(__file__).with_name("slow.py")


def why_not() -> str:
    """Why there can be no hosts here; "" where there can."""
    if shutil.which("ip") is None:
        return "iproute2's ip is not installed"
    probe = f"unidist-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _ip("netns", "delete", probe)
    return ""


class Hosts:
    """So many hosts."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._name = f"unidist-{os.getpid()}-{next(_numbers)}"
        self._net = 1 + os.getpid() % 250
        self._relays: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def prefix(self, host: int) -> list[str]:
        """What a command begins with to run on a host."""
        return ["ip", "netns", "exec", self._space(host)]

    def address(self, host: int, version: int = 4) -> str:
        return f"10.77.{self._net}.{host + 1}" if version == 4 else f"fd77:{self._net:x}::{host + 1}"

    def cut(self, host: int) -> None:
        """What is sent to and from this host is lost."""
        _ip("-n", self._space(None), "link", "set", f"port{host}", "nomaster")

    def slow(self, host: int, seconds: float) -> None:
        """What is sent to and from this host takes so long, until the cable is mended."""
        net = self._space(None)
        _ip("-n", net, "link", "set", f"port{host}", "nomaster")
        _ip("-n", net, "link", "add", f"slow{host}", "type", "veth", "peer", "name", f"far{host}")
        for name in (f"slow{host}", f"far{host}"):
            _ip("-n", net, "link", "set", name, "up")
        _ip("-n", net, "link", "set", f"far{host}", "master", "bridge0")
        inside = ["ip", "netns", "exec", net, sys.executable, str(_SLOW)]
        for space, name in ((self._space(host), "net0"), (net, f"slow{host}"), (net, f"far{host}")):
            subprocess.run(["ip", "netns", "exec", space, *inside[4:], "exact", name], check=True)
        for other in range(self.count):
            subprocess.run([*self.prefix(other), *inside[4:], "exact", "net0"], check=True)
        self._relays[host] = subprocess.Popen([*inside, f"port{host}", f"slow{host}", str(seconds)])

    def mend(self, host: int) -> None:
        if (relay := self._relays.pop(host, None)) is not None:
            relay.kill()
            relay.wait()
            _ip("-n", self._space(None), "link", "delete", f"slow{host}")
        _ip("-n", self._space(None), "link", "set", f"port{host}", "master", "bridge0")

    def _space(self, host: int | None) -> str:
        return f"{self._name}-{'net' if host is None else host}"

    def _make(self) -> None:
        net = self._space(None)
        _ip("netns", "add", net)
        _ip("-n", net, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", net, "link", "set", "bridge0", "up")
        for host in range(self.count):
            space = self._space(host)
            _ip("netns", "add", space)
            _ip("link", "add", "net0", "netns", space, "type", "veth", "peer", "name", f"port{host}", "netns", net)
            _ip("-n", net, "link", "set", f"port{host}", "master", "bridge0", "up")
            _ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "net0")
            _ip("-n", space, "-6", "address", "add", f"{self.address(host, 6)}/64", "dev", "net0", "nodad")
            over = _OVER_ETC / space
            over.mkdir(parents=True)
            names = f"127.0.0.1 localhost\n::1 localhost\n{self.address(host)} {socket.gethostname()}\n"
            (over / "hosts").write_text(names)
            for interface in ("lo", "net0"):
                _ip("-n", space, "link", "set", interface, "up")

    def _remove(self) -> None:
        for relay in self._relays.values():
            relay.kill()
            relay.wait()
        for host in (*range(self.count), None):
            subprocess.run(["ip", "netns", "delete", self._space(host)], capture_output=True, check=False)
            shutil.rmtree(_OVER_ETC / self._space(host), ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

"""Checks what processes need to meet: names, addresses, interfaces, ports, no proxy between."""

from __future__ import annotations

import errno
import ipaddress
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import psutil

from unidist.backends import registry
from unidist.doctor.check import Check, Question
from unidist.launch.request import LOOPBACK, LaunchError, Request, free_port, split_address

Lookup: TypeAlias = Callable[[str], list[str]]

_SECONDS = 10.0

# gRPC asks for them in this order, and knows no upper case.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXEMPT = ("no_grpc_proxy", "no_proxy")
_GLOO = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
_NCCL = "NCCL_SOCKET_IFNAME"


def addresses(host: str) -> list[str]:
    """The IP addresses of a name. Raises OSError: unknown, or no answer within 10 s."""
    answer: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.put(list(dict.fromkeys(str(entry[4][0]) for entry in found)))
        except (OSError, UnicodeError) as error:
            answer.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=ask, daemon=True).start()
    try:
        found = answer.get(timeout=_SECONDS)
    except queue.Empty:
        raise OSError(f"no answer within {_SECONDS:g} s") from None
    if isinstance(found, OSError):
        raise found
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_own(address: str) -> bool:
    """Returns whether this machine has an address."""
    return _refusal(address, 0) is None


def _refusal(address: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error
    return None


def hostname(name: str, nodes: int, lookup: Lookup = addresses, own: Callable[[str], bool] = is_own) -> Check:
    """Checks that the machine's own name leads to it.

    gloo, without an interface named, listens at that address.
    """
    question = Question("hostname", "the hostname resolves to an address at which other machines reach this one")
    advice = (
        "in /etc/hosts give the hostname the address of the network card (`hostname -I`), or DNS; or export "
        "GLOO_SOCKET_IFNAME=INTERFACE on every node"
    )
    if nodes == 1:
        # Gloo then takes the loopback.
        advice = f"nothing on one machine; before you use several: {advice}"
    wrong = question.failed if nodes > 1 else question.warning
    try:
        found = lookup(name)
    except OSError as error:
        return wrong(f"{name!r} does not resolve ({error})", advice)
    said = f"{name} is {', '.join(found)}"
    if foreign := [address for address in found if not own(address)]:
        return wrong(f"{said}, but this machine has no address {', '.join(foreign)}", advice)
    if all(is_loopback(address) for address in found):
        return wrong(f"{said}: the loopback, which other machines do not reach", advice)
    return question.ok(said)


def loopback() -> Check:
    """Checks that a process of this machine reaches another one at a port of the loopback."""
    question = Question("loopback", f"a connection over {LOOPBACK} carries bytes")
    try:
        with socket.create_server((LOOPBACK, free_port())) as server:
            server.settimeout(_SECONDS)
            with socket.create_connection(server.getsockname(), timeout=_SECONDS) as near:
                far, _ = server.accept()
                with far:
                    far.settimeout(_SECONDS)
                    near.sendall(b"unidist")
                    found = far.recv(7, socket.MSG_WAITALL)
    except (OSError, LaunchError) as error:
        return question.failed(str(error), "bring the loopback up (`ip link set lo up`), and let the firewall pass it")
    if found != b"unidist":
        advice = "look for a proxy or firewall that changes connections"
        return question.failed(f"{found!r} came of b'unidist'", advice)
    return question.ok("it does")


def meeting_place(
    address: str, request: Request, lookup: Lookup = addresses, own: Callable[[str], bool] = is_own
) -> Check:
    """Checks that the processes can meet at --address."""
    host, port = split_address(address)
    question = Question("address", f"node 0 can listen at {address}, and the others reach it there")
    try:
        found = lookup(host)
    except OSError as error:
        return question.failed(f"{host!r} does not resolve ({error})", "give node 0's IP address: --address IP:PORT")
    said = f"{host} is {', '.join(found)}"
    if request.nodes > 1 and all(is_loopback(address) for address in found) and host != LOOPBACK:
        return question.failed(
            f"{said} here: the loopback, where other nodes find themselves",
            "give node 0's IP address in the network: --address IP:PORT",
        )
    if request.node_rank > 0:
        return question.ok(f"{said}; whether it answers shows when the world is joined")
    if not any(own(address) for address in found):
        return question.failed(
            f"this is node 0, but {host} ({', '.join(found)}) is another machine's address",
            "give this machine's address on all nodes, or --node-rank 0 to the machine that has it",
        )
    mine = next(a for a in found if own(a))
    if (refusal := _refusal(mine, port)) is not None:
        what = "something listens there already" if refusal.errno == errno.EADDRINUSE else str(refusal)
        advice = "take another port, the same on all nodes; `ss -ltnp` shows who listens"
        return question.failed(f"port {port} of {mine}: {what}", advice)
    return question.ok(f"{said}, the port is free")


def cards() -> dict[str, str]:
    """This machine's network interfaces: name -> IPv4 address, "" where it has none."""
    every = psutil.net_if_addrs().items()
    return {name: next((a.address for a in held if a.family == socket.AF_INET), "") for name, held in every}


def up(name: str) -> bool:
    """Returns whether an interface carries anything; where the system does not say, it is taken to."""
    found = psutil.net_if_stats().get(name)
    return found is None or bool(found.isup)


def interfaces(
    environ: Mapping[str, str], there: Mapping[str, str], works: Callable[[str], bool] = up, own: Sequence[str] = ()
) -> list[Check]:
    """Returns which interface gloo and NCCL take, and whether what the variables name exists.

    Args:
        environ: the environment of the processes.
        there: the interfaces of this machine: name -> IPv4 address, "" where it has none.
        works: whether one of them is up.
        own: the addresses that the hostname resolves to: gloo listens at the first by itself.
    """
    checks = []
    for variable in _GLOO:
        if named := environ.get(variable):
            wanted = [name.strip() for name in named.split(",")]
            checks.append(_named(variable, named, [n for n in wanted if n not in there], wanted, there, works))
    if not environ.get("GLOO_SOCKET_IFNAME"):
        checks.append(_by_hostname(there, own))
    if named := environ.get(_NCCL):
        chosen = matching(named, there)
        checks.append(_named(_NCCL, named, [] if chosen else [named], chosen, there, works))
    else:
        rest = [n for n in there if n != "lo" and not n.startswith(("docker", "veth", "br-")) and works(n)]
        first = next((n for n in rest if n.startswith("ib")), rest[0] if rest else "lo")
        checks.append(Question("NCCL's interface", "NCCL takes one that exists").ok(f"none is named: {first}"))
    return checks


def _by_hostname(there: Mapping[str, str], own: Sequence[str]) -> Check:
    question = Question("gloo's interface", "gloo takes one that exists")
    found = "none is named, so gloo takes that of the hostname"
    if not own:
        advice = f"repair the hostname, or export GLOO_SOCKET_IFNAME=ONE OF {', '.join(there)}"
        return question.not_checked(f"{found}, which leads nowhere here", advice)
    chosen = next((card for card, address in there.items() if address == own[0]), None)
    said = f"{chosen}, with the address {own[0]}" if chosen else f"the one with the address {own[0]}"
    return question.ok(f"{found}: {said}")


def matching(named: str, there: Iterable[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME means: prefixes; "=": whole names; "^": all but these."""
    without, text = named.startswith("^"), named.removeprefix("^")
    exact, text = text.startswith("="), text.removeprefix("=")
    words = [word for word in text.split(",") if word]
    met = [name for name in there if any(name == word if exact else name.startswith(word) for word in words)]
    return [name for name in there if name not in met and name != "lo"] if without else met


def _named(
    variable: str,
    named: str,
    missing: Sequence[str],
    chosen: Sequence[str],
    there: Iterable[str],
    works: Callable[[str], bool],
) -> Check:
    question = Question(variable, f"{variable} names an interface of this machine that is up")
    known = ", ".join(there)
    if missing:
        found = f"{variable}={named}: there is no {', '.join(missing)} here, there are {known}"
        advice = f"export {variable}=ONE OF THESE, or unset it; it may differ from node to node"
        return question.failed(found, advice)
    if down := [name for name in chosen if not works(name)]:
        found = f"{variable}={named}: {', '.join(down)} is down; there are {known}"
        return question.failed(found, f"ip link set {down[0]} up, or name another")
    return question.ok(f"{variable}={named}: {', '.join(chosen)}")


def proxies(environ: Mapping[str, str], host: str, used: Sequence[str]) -> Check:
    """Checks that no proxy stands between processes that meet over gRPC: they would wait for ever.

    Args:
        environ: the environment of the processes.
        host: where they meet.
        used: the backends that are, or may be, used.
    """
    question = Question("proxies", f"connections to {host} go there without a proxy")
    proxy = next((name for name in _PROXIES if environ.get(name)), None)
    if proxy is None:
        return question.ok("none is set")
    exempt = next((name for name in _EXEMPT if environ.get(name)), "no_proxy")
    said = f"{proxy}={environ[proxy]}, {exempt}={environ.get(exempt, '')}"
    if _is_exempt(host, environ.get(exempt, "")):
        return question.ok(said)
    concerned = [name for name in used if registry.entry(name).over_grpc]
    if not concerned:
        return question.ok(f"{said}: only gRPC would go through it, by which none of the backends in use meets")
    found = f"{said}: {' and '.join(concerned)} reach their other processes through the proxy, and hang"
    advice = f"export no_proxy={','.join(filter(None, (environ.get(exempt), host, 'localhost')))} (lower case)"
    return question.failed(found, advice)


def _is_exempt(host: str, text: str) -> bool:
    for word in (w.strip() for w in text.split(",")):
        if word == "*" or (word and host.endswith(word)):
            return True
        try:
            if "/" in word and ipaddress.ip_address(host) in ipaddress.ip_network(word, strict=False):
                return True
        except ValueError:  # a host by its name, or no network
            continue
    return False

"""On one node nobody beyond the machine can connect: every listening socket of a job is read from /proc."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.launch.runs import finish, start, wait_until
from tests.visible import WITH_TENSORFLOW
from unidist.launch import ending

pytestmark = pytest.mark.processes
BACKENDS = ("torch", "jax", "tensorflow", "horovod")
LISTENS = "0A"

# Joins, sends something, reports which of its sockets are bound to the loopback's interface, and waits.
PROGRAM = """
import json, os, pathlib, socket, time
import unidist

backend = unidist.use()
backend.barrier()
bound = []
for name in os.listdir("/proc/self/fd"):
    try:
        inode = os.readlink(f"/proc/self/fd/{name}")
        with socket.socket(fileno=os.dup(int(name))) as found:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(bytes(1)) == b"lo":
                bound.append(inode)
    except OSError:
        continue
path = pathlib.Path(f"rank{unidist.process_index()}.part")
path.write_text(json.dumps(bound))
path.rename(path.with_suffix(".json"))
time.sleep(600)
"""


def listening(pid: int) -> dict[str, str]:
    """The addresses at which a process listens, by "socket:[inode]"."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(link))
        except OSError:
            continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in own:
                found[f"socket:[{words[9]}]"] = address(words[1])
    return found


def address(text: str) -> str:
    """The address of "0100007F:1F90"; four bytes at a time, in the machine's order."""
    words = re.findall("." * 8, text.partition(":")[0])
    raw = b"".join(int(word, 16).to_bytes(4, "little") for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


@pytest.mark.parametrize(("backend", "restarts"), [*((backend, "0") for backend in BACKENDS), ("torch", "1")])
def test_one_node_listens_on_the_loopback_alone(
    backend: str, restarts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's processes meet elsewhere where they may be started again."""
    for name, value in WITH_TENSORFLOW.items() if backend == "tensorflow" else ():
        monkeypatch.setenv(name, value)
    run_id = f"listening {tmp_path}"
    monkeypatch.setenv(ending.MARK, run_id)
    (tmp_path / "train.py").write_text(PROGRAM)
    process = start(["-n", "2", "--backend", backend, "--max-restarts", restarts, "train.py"], tmp_path)
    try:
        wait_until(lambda: process.poll() is not None or len(list(tmp_path.glob("rank*.json"))) == 2, "two ranks", 120)
        found = {pid: listening(pid) for pid in ending.marked(run_id)}
    finally:
        process.send_signal(signal.SIGTERM)
        done = finish(process, 30)
    bound = {inode for path in tmp_path.glob("rank*.json") for inode in json.loads(path.read_text())}
    places = {(inode, at) for own in found.values() for inode, at in own.items()}
    assert places, done.err
    beyond = {(inode, at) for inode, at in places if not at.startswith(("127.", "::ffff:127.")) and at != "::1"}
    # TensorFlow's own servers know no other address; their sockets are bound to the interface.
    assert {at for inode, at in beyond if inode not in bound} == set()
    assert backend == "tensorflow" or not beyond

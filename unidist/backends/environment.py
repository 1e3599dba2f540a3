"""Reads what launchers give a process: torchrun, srun, horovodrun, JAX's variables and unidist's own."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidist.errors import BackendNotAvailableError

# Seconds to wait for others where the program does not say; `unidist run --timeout` sets it.
TIMEOUT = "UNIDIST_TIMEOUT"
# How often the run was started again.
RESTARTS = "UNIDIST_RESTARTS"
# The memory files of the node: "NODE PID DESCRIPTOR DESCRIPTOR...", so many for each of its processes, in their order.
MEMORY = "UNIDIST_MEMORY"
# A step that stands, and the one that takes its place.
EACH = 2
_WAIT = 300.0
# Above the range that Linux hands to outgoing connections.
_FIRST_PORT, _PORT_COUNT = 61440, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launcher's description of the world.

    Attributes:
        launcher: the name of a `Launcher`, as "torchrun", or "slurm".
        address: "host:port" of process 0, or None where the runtime finds it by itself.
        local_index: this process's number on its host: its accelerator.
        local_count: how many there are on its host; None where the launcher does not say.
    """

    launcher: str
    address: str | None
    process_count: int
    process_index: int
    local_index: int
    local_count: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The variables by which a launcher gives a process its place in the world.

    Attributes:
        name: what `Launch` calls it.
        count, index: variables of the number of processes and of the process's own. Both are always set.
        local_count, local_index: the same on its host; "" where the launcher does not say.
        address: the variable of process 0's "host:port", which is always set too; or those of its host and of its
            port, which may be missing; or none.
        others: what else it sets, for its own processes alone.

    Example:
        >>> wired = Launcher(name="wired", count="WIRED_SIZE", index="WIRED_RANK", address=("WIRED_ADDRESS",))
        >>> launch = Launch(launcher="wired", address="a:1", process_count=4, process_index=3, local_index=0)
        >>> wired.variables(launch)
        {'WIRED_SIZE': '4', 'WIRED_RANK': '3', 'WIRED_ADDRESS': 'a:1'}
        >>> wired.read(wired.variables(launch)) == launch
        True
    """

    name: str
    count: str
    index: str
    local_count: str = ""
    local_index: str = ""
    address: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def always(self) -> tuple[str, ...]:
        """The variables that it always sets: without one of them it has not started a process."""
        return (self.index, self.count, *(self.address if len(self.address) == 1 else ()))

    @property
    def names(self) -> frozenset[str]:
        """All that it sets."""
        known = (self.count, self.index, self.local_count, self.local_index, *self.address, *self.others)
        return frozenset(filter(None, known))

    def read(self, env: Mapping[str, str]) -> Launch | None:
        """Returns what it says in an environment; None where it has started nothing."""
        if any(name not in env for name in self.always):
            return None
        return Launch(
            launcher=self.name,
            address=self._address([env[name] for name in self.address if name in env]),
            process_count=_integer(env, self.count),
            process_index=_integer(env, self.index),
            local_index=_integer(env, self.local_index, 0),
            local_count=_integer(env, self.local_count) if self.local_count in env else None,
        )

    def _address(self, said: Sequence[str]) -> str | None:
        if len(said) < max(1, len(self.address)):
            return None
        return said[0] if len(said) == 1 else join_address(*said)

    def variables(self, launch: Launch, local_count: int = 1) -> dict[str, str]:
        """Returns the variables that it gives to a process of `local_count` on its host."""
        address = launch.address or ""
        said = {
            self.count: str(launch.process_count),
            self.index: str(launch.process_index),
            self.local_count: str(local_count),
            self.local_index: str(launch.local_index),
            **dict(zip(self.address, [address] if len(self.address) == 1 else address.rsplit(":", 1), strict=False)),
        }
        said.pop("", None)
        return said


HOROVOD = Launcher(
    name="horovod",
    count="HOROVOD_SIZE",
    index="HOROVOD_RANK",
    local_count="HOROVOD_LOCAL_SIZE",
    local_index="HOROVOD_LOCAL_RANK",
    others=(
        *("HOROVOD_HOSTNAME", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_GLOO_IFACE"),
        *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
)
TORCHRUN = Launcher(
    name="torchrun",
    count="WORLD_SIZE",
    index="RANK",
    local_count="LOCAL_WORLD_SIZE",
    local_index="LOCAL_RANK",
    address=("MASTER_ADDR", "MASTER_PORT"),
    others=(
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        "TORCHELASTIC_USE_AGENT_STORE",
    ),
)
JAX = Launcher(
    name="jax",
    count="JAX_NUM_PROCESSES",
    index="JAX_PROCESS_ID",
    local_index="JAX_LOCAL_PROCESS_ID",
    address=("JAX_COORDINATOR_ADDRESS",),
    others=("JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS"),
)
_LAUNCHERS = {launcher.name: launcher for launcher in (HOROVOD, TORCHRUN, JAX)}


def launchers() -> Mapping[str, Launcher]:
    """Returns all that are known, by name. Of several that left their variables the first one counts.

    It is the innermost.
    """
    return _LAUNCHERS


def learn(launcher: Launcher) -> None:
    """Makes its variables known. Those above may run inside of it."""
    _LAUNCHERS[launcher.name] = launcher


def detect(environ: Mapping[str, str] | None = None) -> Launch | None:
    """The launch that the environment describes, or None where there is no launcher.

    Where several have left their variables, the innermost counts: srun may start torchrun, never the other way round.

    Raises:
        BackendNotAvailableError: a variable that must be a number is none.
    """
    env = os.environ if environ is None else environ
    return next(filter(None, (launcher.read(env) for launcher in _LAUNCHERS.values())), None) or _slurm(env)


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory files of a node, as a process of it sees them.

    Attributes:
        node: a number drawn by chance, by which processes of one node know each other.
        paths: of all files.

    Example:
        >>> NodeMemory.read({"UNIDIST_MEMORY": "7 4321 5 6"})
        NodeMemory(node=7, paths=('/proc/4321/fd/5', '/proc/4321/fd/6'))
        >>> NodeMemory.read({}) is None
        True
    """

    node: int
    paths: tuple[str, ...]

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> NodeMemory | None:
        """Reads what the launcher has said. None: there is none, or it keeps no memory."""
        said = (os.environ if environ is None else environ).get(MEMORY)
        if not said:
            return None
        node, pid, *descriptors = said.split()
        return cls(int(node), tuple(f"/proc/{pid}/fd/{one}" for one in descriptors))

    def of(self, local_index: int) -> tuple[str, ...]:
        """Returns the paths of one process of the node."""
        return self.paths[EACH * local_index : EACH * (local_index + 1)]


def timeout(environ: Mapping[str, str] | None = None) -> float:
    """Seconds to wait for other processes, as the environment says.

    Raises:
        BackendNotAvailableError: what it says is no number above zero.
    """
    said = (os.environ if environ is None else environ).get(TIMEOUT) or str(_WAIT)
    seconds = seconds_of(said)
    if seconds is None:
        raise BackendNotAvailableError(f"the environment has {TIMEOUT}={said!r}, which should be seconds above 0")
    return seconds


def seconds_of(said: Any) -> float | None:
    """Returns what is said as a number of seconds above zero; None where it is none."""
    try:
        seconds = float(said)
    except (TypeError, ValueError):
        return None
    return seconds if 0 < seconds < math.inf else None


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy without what a launcher said to this process: for processes that get a launcher of their own."""
    said = frozenset().union(*(launcher.names for launcher in _LAUNCHERS.values()))
    return {name: value for name, value in environ.items() if name not in said}


def join_address(host: str, port: str) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise BackendNotAvailableError(
            f"the environment has {name}={value!r}, which should be a number: "
            f"unset it, or start the program with a launcher that sets it"
        ) from None


def _slurm(env: Mapping[str, str]) -> Launch | None:
    if "SLURM_PROCID" not in env or _integer(env, "SLURM_NTASKS", 1) <= 1 or _is_batch_script(env):
        return None
    return Launch(
        launcher="slurm",
        address=_slurm_address(env),
        process_count=_integer(env, "SLURM_NTASKS"),
        process_index=_integer(env, "SLURM_PROCID"),
        local_index=_integer(env, "SLURM_LOCALID", 0),
        local_count=_slurm_local_count(env),
    )


def _slurm_local_count(env: Mapping[str, str]) -> int | None:
    """Returns the step's tasks on this node.

    They are read from Slurm's compressed list: "2(x3),1" are two on each of three nodes, then one.
    """
    said = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts = [
        int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", said) for _ in range(int(times or 1))
    ]
    node = _integer(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else None


def _is_batch_script(env: Mapping[str, str]) -> bool:
    """Returns whether this is sbatch's own shell: task 0 of the job's count, but started by no srun."""
    return env.get("ENVIRONMENT") == "BATCH" and not any(name.startswith("SLURM_STEP_") for name in env)


def _slurm_address(env: Mapping[str, str]) -> str:
    """Returns MASTER_ADDR and MASTER_PORT if set, else the step's first host and a port of its own.

    That port is made from the job's and step's numbers.
    """
    number = _integer(env, "SLURM_JOB_ID", 0) + _integer(env, "SLURM_STEP_ID", 0)
    port = env.get("MASTER_PORT") or str(_FIRST_PORT + number % _PORT_COUNT)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or "localhost"
    return join_address(env.get("MASTER_ADDR") or first_host(nodes), port)


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list: "gpu[003-007,9],x1" -> "gpu003"."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    first = match.group() if match else nodes
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)

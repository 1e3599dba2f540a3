"""What launchers tell a process: torchrun, srun, horovodrun, JAX's variables and unidist's own."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from unidist.errors import BackendNotAvailableError

_LAUNCHERS = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
        *("JAX_LOCAL_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS"),
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_HOSTNAME"),
        *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_GLOO_IFACE"),
        *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    )
)
# Seconds to wait for others where the program does not say; `unidist run --timeout` sets it.
TIMEOUT = "UNIDIST_TIMEOUT"
_WAIT = 300.0
# Above the range that Linux hands to outgoing connections.
_FIRST_PORT, _PORT_COUNT = 61440, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launcher's description of the world.

    Attributes:
        launcher: "torchrun", "jax", "horovod" or "slurm".
        address: "host:port" of process 0, or None where the runtime finds it by itself.
        local_index: this process's number on its host: its accelerator.
    """

    launcher: str
    address: str | None
    process_count: int
    process_index: int
    local_index: int


def detect(environ: Mapping[str, str] | None = None) -> Launch | None:
    """The launch that the environment describes, or None where there is no launcher.

    Where several have left their variables, the innermost counts: srun may start torchrun, never the other way round.

    Raises:
        BackendNotAvailableError: a variable that must be a number is none.
    """
    env = os.environ if environ is None else environ
    if "HOROVOD_RANK" in env and "HOROVOD_SIZE" in env:
        return _launch(env, "horovod", None, "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK")
    if "RANK" in env and "WORLD_SIZE" in env:
        known = "MASTER_ADDR" in env and "MASTER_PORT" in env
        address = join_address(env["MASTER_ADDR"], env["MASTER_PORT"]) if known else None
        return _launch(env, "torchrun", address, "WORLD_SIZE", "RANK", "LOCAL_RANK")
    if "JAX_COORDINATOR_ADDRESS" in env and "JAX_NUM_PROCESSES" in env and "JAX_PROCESS_ID" in env:
        address = env["JAX_COORDINATOR_ADDRESS"]
        return _launch(env, "jax", address, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_PROCESS_ID")
    if "SLURM_PROCID" in env and _integer(env, "SLURM_NTASKS", 1) > 1 and not _is_batch_script(env):
        return _launch(env, "slurm", _slurm_address(env), "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    return None


def timeout(environ: Mapping[str, str] | None = None) -> float:
    """Seconds to wait for other processes, as the environment says.

    Raises:
        BackendNotAvailableError: what it says is no number above zero.
    """
    said = (os.environ if environ is None else environ).get(TIMEOUT) or str(_WAIT)
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BackendNotAvailableError(f"the environment has {TIMEOUT}={said!r}, which should be seconds above 0")
    return seconds


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy without what a launcher said to this process: for processes that get a launcher of their own."""
    return {name: value for name, value in environ.items() if name not in _LAUNCHERS}


def join_address(host: str, port: str) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _launch(env: Mapping[str, str], launcher: str, address: str | None, count: str, index: str, local: str) -> Launch:
    return Launch(
        launcher=launcher,
        address=address,
        process_count=_integer(env, count),
        process_index=_integer(env, index),
        local_index=_integer(env, local, 0),
    )


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


def _is_batch_script(env: Mapping[str, str]) -> bool:
    """sbatch's own shell sees the job's task count and is task 0, but it is one process: no srun started it."""
    return env.get("ENVIRONMENT") == "BATCH" and not any(name.startswith("SLURM_STEP_") for name in env)


def _slurm_address(env: Mapping[str, str]) -> str:
    """MASTER_ADDR/MASTER_PORT if set, else the step's first host and a port made from the job's and step's numbers."""
    number = _integer(env, "SLURM_JOB_ID", 0) + _integer(env, "SLURM_STEP_ID", 0)
    port = env.get("MASTER_PORT") or str(_FIRST_PORT + number % _PORT_COUNT)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or "localhost"
    return join_address(env.get("MASTER_ADDR") or first_host(nodes), port)


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list: "gpu[003-007,9],x1" -> "gpu003"."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    first = match.group() if match else nodes
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)

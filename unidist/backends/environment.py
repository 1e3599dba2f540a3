"""What launchers tell a process: torchrun, srun, horovodrun, JAX's variables and unidist's own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


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
    """The launch that the environment describes, or None where there is no launcher."""
    env = os.environ if environ is None else environ
    if "HOROVOD_RANK" in env and "HOROVOD_SIZE" in env:
        return Launch(
            launcher="horovod",
            address=None,
            process_count=int(env["HOROVOD_SIZE"]),
            process_index=int(env["HOROVOD_RANK"]),
            local_index=int(env.get("HOROVOD_LOCAL_RANK", 0)),
        )
    if "RANK" in env and "WORLD_SIZE" in env:
        address = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" if "MASTER_PORT" in env else None
        return Launch(
            launcher="torchrun",
            address=address,
            process_count=int(env["WORLD_SIZE"]),
            process_index=int(env["RANK"]),
            local_index=int(env.get("LOCAL_RANK", 0)),
        )
    if "JAX_COORDINATOR_ADDRESS" in env and "JAX_NUM_PROCESSES" in env and "JAX_PROCESS_ID" in env:
        return Launch(
            launcher="jax",
            address=env["JAX_COORDINATOR_ADDRESS"],
            process_count=int(env["JAX_NUM_PROCESSES"]),
            process_index=int(env["JAX_PROCESS_ID"]),
            local_index=int(env.get("JAX_LOCAL_PROCESS_ID", 0)),
        )
    if int(env.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in env:
        return Launch(
            launcher="slurm",
            address=_slurm_address(env),
            process_count=int(env["SLURM_NTASKS"]),
            process_index=int(env["SLURM_PROCID"]),
            local_index=int(env.get("SLURM_LOCALID", 0)),
        )
    return None


def _slurm_address(env: Mapping[str, str]) -> str:
    """MASTER_ADDR/MASTER_PORT if set, else the first host and a port made from the job's number."""
    port = env.get("MASTER_PORT") or str(61440 + int(env.get("SLURM_JOB_ID", 0)) % 4096)
    if "MASTER_ADDR" in env:
        return f"{env['MASTER_ADDR']}:{port}"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    return f"{first_host(nodes)}:{port}"


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed list: "gpu[003-007,9],x1" -> "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", nodes)
    if match is None:
        return nodes
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[,-]", numbers)[0] if numbers else "") + suffix

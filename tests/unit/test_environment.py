"""What each launcher says, and what is made of it."""

from __future__ import annotations

import pytest

from unidist.backends.environment import Launch, detect, first_host, without_launcher
from unidist.errors import BackendNotAvailableError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
HOROVOD = {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "0"}
JAX = {"JAX_COORDINATOR_ADDRESS": "node0:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "1001",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_NODELIST": "gpu[001-008]",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def launch(launcher: str, address: str | None, count: int, index: int, local: int) -> Launch:
    return Launch(launcher=launcher, address=address, process_count=count, process_index=index, local_index=local)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        (TORCHRUN, launch("torchrun", "node0:29500", 8, 5, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, launch("torchrun", None, 1, 0, 0)),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}, launch("torchrun", None, 2, 0, 0)),
        ({**TORCHRUN, "MASTER_ADDR": "fe80::1"}, launch("torchrun", "[fe80::1]:29500", 8, 5, 1)),
        (HOROVOD, launch("horovod", None, 3, 2, 0)),
        (JAX, launch("jax", "node0:1234", 4, 3, 0)),
        ({**JAX, "JAX_LOCAL_PROCESS_ID": "1"}, launch("jax", "node0:1234", 4, 3, 1)),
        ({"JAX_COORDINATOR_ADDRESS": "node0:1234"}, None),
        (SLURM, launch("slurm", f"gpu003:{61440 + 1003}", 8, 6, 2)),
        ({**SLURM, "MASTER_PORT": "2000"}, launch("slurm", "gpu003:2000", 8, 6, 2)),
        ({**SLURM, "MASTER_ADDR": "other"}, launch("slurm", f"other:{61440 + 1003}", 8, 6, 2)),
        ({**SLURM, "SLURM_NTASKS": "1"}, None),
        # torchrun under srun: the inner one counts.
        ({**SLURM, **TORCHRUN}, launch("torchrun", "node0:29500", 8, 5, 1)),
        ({**SLURM, **JAX}, launch("jax", "node0:1234", 4, 3, 0)),
        ({**SLURM, **HOROVOD}, launch("horovod", None, 3, 2, 0)),
    ],
)
def test_detect(environ: dict[str, str], expected: Launch | None) -> None:
    assert detect(environ) == expected


def test_a_batch_script_without_srun_is_one_process() -> None:
    batch = {k: v for k, v in SLURM.items() if not k.startswith("SLURM_STEP_")} | {
        "ENVIRONMENT": "BATCH",
        "SLURM_PROCID": "0",
    }
    assert detect(batch) is None
    assert detect({**batch, "SLURM_STEP_ID": "0"}) is not None


def test_slurm_without_step_variables_uses_the_jobs_nodes() -> None:
    environ = {k: v for k, v in SLURM.items() if not k.startswith("SLURM_STEP_")}
    found = detect(environ)
    assert found is not None
    assert found.address == f"gpu001:{61440 + 1001}"


def test_the_port_of_a_large_job_number_is_a_port() -> None:
    found = detect({**SLURM, "SLURM_JOB_ID": str(2**31)})
    assert found is not None
    assert found.address is not None
    assert 61440 <= int(found.address.rsplit(":")[-1]) < 65536


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("localhost", "localhost"),
        ("a,b", "a"),
        ("gpu[003-007,9],x1", "gpu003"),
        ("gpu[9,11-12]", "gpu9"),
        ("gpu[1-2]-ib.cluster,gpu9", "gpu1-ib.cluster"),
        ("rack[1-2]node[3,5-6]", "rack1node3"),
        ("node-07.site,node[08-09]", "node-07.site"),
    ],
)
def test_first_host_of_slurms_lists(nodes: str, expected: str) -> None:
    assert first_host(nodes) == expected


@pytest.mark.parametrize("value", ["", "many"])
def test_a_number_that_is_none_is_named(value: str) -> None:
    with pytest.raises(BackendNotAvailableError, match=f"WORLD_SIZE='{value}'"):
        detect({**TORCHRUN, "WORLD_SIZE": value})


def test_without_launcher_leaves_the_rest() -> None:
    assert without_launcher({**TORCHRUN, **JAX, **HOROVOD, "HOME": "/root", "RANKING": "1"}) == {
        "HOME": "/root",
        "RANKING": "1",
    }
    assert detect(without_launcher({**TORCHRUN, **JAX, **HOROVOD})) is None


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        (TORCHRUN, None),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, 4),
        ({**HOROVOD, "HOROVOD_LOCAL_SIZE": "1"}, 1),
        (SLURM, None),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}, 1),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, 2),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 1),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "3"}, None),
    ],
)
def test_how_many_share_a_host(environ: dict[str, str], count: int | None) -> None:
    found = detect(environ)
    assert found is not None
    assert found.local_count == count

"""Which errors of torch.distributed mean that another process was lost. NCCL's words are those of torch and NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from unidist.backends.torch.lost import is_loss, told
from unidist.errors import ProcessLostError

NCCL = dist.DistBackendError


def nccls(words: str, name: str, meaning: str, last: str = "") -> RuntimeError:
    """An error as torch writes NCCL's."""
    where = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94"
    return NCCL(f"{where}, {words}, NCCL version 2.27.5\n{name}: {meaning}\nLast error:\n{last}")


CUDA = ("unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "ncclUnhandledCudaError")
USAGE = ("invalid usage (run with NCCL_DEBUG=WARN for details)", "ncclInvalidUsage")
ARGUMENT = ("invalid argument (run with NCCL_DEBUG=WARN for details)", "ncclInvalidArgument")
INTERNAL = ("internal error - please report this issue to the NCCL developers", "ncclInternalError")
SYSTEM = ("unhandled system error (run with NCCL_DEBUG=INFO for details)", "ncclSystemError")
REMOTE = ("remote process exited or there was a network error", "ncclRemoteError")
CALLED = "Call to CUDA function failed."
OF_THIS_PROCESS = {
    "usage": nccls(*USAGE, "This usually reflects invalid usage of NCCL library.", "Duplicate GPU detected : rank 0"),
    "argument": nccls(*ARGUMENT, "Invalid value for an argument.", "Broadcast : invalid root 3 (root should be in"),
    "memory": nccls(*CUDA, CALLED, "Failed to CUDA calloc async 24 bytes"),
    "peer access": nccls(*CUDA, CALLED, "Cuda failure 217 'peer access is not supported between these two devices'"),
    "internal": nccls(*INTERNAL, "Internal check failed.", "Message truncated : received 4 bytes instead of 8"),
    "kernel": torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
    "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB; a peer has the rest"),
    "dtype": RuntimeError("Invalid scalar type"),
}
OF_ANOTHER = {
    "remote": nccls(*REMOTE, "A call failed possibly due to a network error or a remote process exiting prematurely."),
    "system": nccls(*SYSTEM, "System call (e.g. socket, malloc) or external library call failed or device error."),
    "internal": nccls(*INTERNAL, "Internal check failed.", "Net : Connection closed by remote peer node1<34567>"),
    "watchdog": NCCL("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"),
    "aborted": NCCL("NCCL communicator was aborted on rank 0."),
    "meeting": NCCL("[0] is setting up NCCL communicator and retrieving ncclUniqueId: Connection reset by peer"),
    "store": dist.DistStoreError("wait timeout after 8000ms"),
    "network": dist.DistNetworkError("failed to recv, got 0 bytes"),
    "gloo": RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
}


def raising(error: RuntimeError) -> Callable[[], None]:
    def call() -> None:
        with told("all_reduce", (0, 1)):
            raise error

    return call


@pytest.mark.parametrize("name", OF_THIS_PROCESS)
def test_an_error_of_this_process_stays_what_it_is(name: str) -> None:
    error = OF_THIS_PROCESS[name]
    assert not is_loss(error)
    with pytest.raises(type(error)) as found:
        raising(error)()
    assert found.value is error


@pytest.mark.parametrize("name", OF_ANOTHER)
def test_an_error_of_another_process_is_its_loss(name: str) -> None:
    with pytest.raises(ProcessLostError, match=r"all_reduce over ranks \[0, 1\]: another process") as found:
        raising(OF_ANOTHER[name])()
    assert found.value.__cause__ is OF_ANOTHER[name]

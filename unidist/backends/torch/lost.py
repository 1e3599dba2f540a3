"""Turns torch.distributed's errors, where a peer is gone, into ProcessLostError."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from unidist.backends.joining import lost
from unidist.errors import ProcessLostError

# gloo raises plain RuntimeErrors: only their words tell a lost peer from a mistake in the arguments.
_WORDS = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|(read|write) error|timed out|timeout|not connected"
    r"|pair closure|socket|remote (process|worker)|peer|unhandled system error|communicator was aborted",
    re.IGNORECASE,
)
# NCCL's errors are all of one type. These classes are of this process: arguments, its GPU, its memory. Their words may
# be those of a loss all the same, as "peer access is not supported".
_NCCLS_OWN = re.compile(r"ncclInvalidUsage|ncclInvalidArgument|ncclUnhandledCudaError")
# Old versions say so of a connection that broke too.
_NCCLS_EITHER = "ncclInternalError"


def is_loss(error: RuntimeError) -> bool:
    """Returns whether an error of torch.distributed means that another process ended or did not come."""
    text = str(error)
    # CUDA's own: a kernel "timed out" too.
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        return False
    if isinstance(error, dist.DistBackendError):
        if _NCCLS_OWN.search(text):
            return False
        return _NCCLS_EITHER not in text or bool(_WORDS.search(text))
    return isinstance(error, dist.DistNetworkError | dist.DistStoreError) or bool(_WORDS.search(text))


@contextlib.contextmanager
def told(what: str, ranks: tuple[int, ...]) -> Iterator[None]:
    """Turns the loss of a peer during a collective over `ranks` into ProcessLostError; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        reraise(error, what, ranks)


def reraise(error: RuntimeError, what: str, ranks: tuple[int, ...]) -> NoReturn:
    """Raises the ProcessLostError that an error means, or the error itself."""
    if isinstance(error, ProcessLostError) or not is_loss(error):
        raise error
    raise lost(f"{what} over ranks {list(ranks)}", _first_line(error)) from error


def _first_line(error: RuntimeError) -> str:
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    # Gloo's advice is not ours.
    line = line.partition(". This is typically")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line)

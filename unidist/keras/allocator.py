"""The C library's allocator, where large tensors come and go within every step."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from typing import Any

LARGE_BYTES = 4 << 20
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_SETTINGS = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)


@functools.cache
def give_back_large_blocks() -> bool:
    """Has glibc give blocks of 4 MiB and more back to the system when they are freed; whether it does now.

    By itself glibc serves them from its heap as soon as one of their size was freed. Fetched parameters and gradients
    then leave holes that activations take pieces of, and a process holds twice what lives in it. Holds for the whole
    process; the system clears each block anew, which is time. Settings of the user's own are left as they are.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = _of_libc("mallopt")
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))


def give_back_after(size: int) -> None:
    """Gives back free memory when a variable of so many bytes was made or read.

    Frameworks leave values in cycles of references, and glibc keeps what each of their threads has freed.
    """
    if size < LARGE_BYTES:
        return
    gc.collect(1)
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


@functools.cache
def _of_libc(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library
        return None

"""torch.func's transforms: whether they are at work, and how to compute past them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._functorch import pyfunctorch


def are_at_work() -> bool:
    """Returns whether torch.func is computing.

    Its tensors have no memory of their own, and none of what it reads may go.
    """
    found: bool = torch._C._are_functorch_transforms_active()
    return found


def left() -> contextlib.AbstractContextManager[Any]:
    """Inside torch.func's transforms, which a layer has begun, see nothing of what is computed."""
    if not are_at_work():
        return contextlib.nullcontext()
    return pyfunctorch.temporarily_clear_interpreter_stack()

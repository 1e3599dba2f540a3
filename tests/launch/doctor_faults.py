"""The worker of `unidist doctor` with faults: rank 1 of torch gets wrong values from rank 0, and hangs in link 1-2.

python doctor_faults.py TASK
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from unidist.backends.torch.backend import TorchBackend
from unidist.doctor import worker

sound = TorchBackend.permute


def permute(self: TorchBackend, x: torch.Tensor, sharding: Any, axes: Any, pairs: Any) -> torch.Tensor:
    if self.rank == 1 and set(pairs[0]) == {1, 2}:
        time.sleep(600)
    found = sound(self, x, sharding, axes, pairs)
    return found + 1 if self.rank == 1 and set(pairs[0]) == {0, 1} else found


TorchBackend.permute = permute  # type: ignore[method-assign]
worker.main(sys.argv[1:])

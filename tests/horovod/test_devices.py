"""Horovod moves tensors of CPUs, whatever it was built for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import preloaded
from unidist.testing.processes import ProcessWorld

pytestmark = pytest.mark.processes


def refuse() -> str:
    """What is said of a tensor that is not on a CPU."""
    import torch

    from unidist.backends.horovod.over_torch import Primitives
    from unidist.errors import CapabilityError

    transport: Any = SimpleNamespace(ranks=(0, 1), native=None, name=lambda: "x")
    try:
        Primitives(1.0).start("all_reduce", transport, lambda *_, **__: 0, torch.empty(3, device="meta"))
    except CapabilityError as error:
        return str(error)
    return ""


def test_a_tensor_elsewhere_is_refused() -> None:
    with ProcessWorld(1, launcher=None, preload=preloaded.TORCH) as world:
        (said,) = world.call(refuse)
    assert said.startswith("use('horovod') moves CPU tensors, and this one is on meta")

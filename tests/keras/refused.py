"""What large models are trained with, asked of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import unidist
from unidist import session


def over(name: str, **options: Any) -> Callable[[int], Any]:
    """Makes a strategy of so many devices on one axis of this name."""
    kind = unidist.DataParallel if name == "data" else unidist.ModelParallel
    return lambda count: kind(unidist.Mesh({name: count}), **options)


def replicas(count: int) -> Any:
    return unidist.DataParallel(unidist.Mesh({"replica": count // 2, "shard": 2}), zero=1, shard_axis="shard")


FEATURES: dict[str, Callable[[int], Any]] = {
    "contexts": over("context"),
    "ring": over("context", attention="ring"),
    "sequence_parallel": over("model", sequence_parallel=True),
    "dispatch": over("data", experts="dispatch"),
    "axis of experts": over("expert"),
    "remat": over("data", remat="block"),
    "replicas": replicas,
    "offload": over("data", offload="states"),
    "exact_random": over("data", exact_random=True),
    "per_tensor_rows": over("data", per_tensor_rows=True),
}


def answers() -> dict[str, str]:
    """By feature, the error by which it is refused; "" where it is not."""
    found = {}
    for name, make in FEATURES.items():
        try:
            make(len(session.list_devices()))
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found

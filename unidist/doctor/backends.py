"""Finds which backends work here, and each one's devices: asks a process of its own for each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from unidist.backends import registry
from unidist.backends.environment import without_launcher
from unidist.doctor.check import Check, counted
from unidist.errors import BackendNotAvailableError

Ask: TypeAlias = Callable[[str], Mapping[str, Any]]

# A framework's imports take a minute from a cold network disk.
SECONDS = 180.0
_AT_ONCE = 2
_ASKED = "its adapter can be imported and finds its devices"


def check(ask: Ask | None = None, cards: int | None = None) -> list[Check]:
    """One check for each backend that is known here, and one for Keras on each that works.

    Args:
        ask: backend -> {"devices": names, "keras": what `unidist.keras.backend_probe` says} or {"error": text}; by
            default a process that imports it.
        cards: NVIDIA cards of this machine; None: they are counted.
    """
    cards = count_cards() if cards is None else cards
    checks: dict[str, Check] = {}
    there = []
    names = registry.names()
    for name in names:
        try:
            registry.find(name)
        except BackendNotAvailableError as error:
            found = "not installed"
            checks[name] = Check(
                name=_name(name), asked=_ASKED, status="not checked", found=found, advice=f"to have it: {error}"
            )
        else:
            there.append(name)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for name, told in zip(there, pool.map(ask or ask_a_process, there), strict=True):
            checks[name] = judge(name, told, cards)
            if keras := told.get("keras"):
                checks[f"{name} with Keras"] = judge_keras(name, keras)
    return [checks[key] for name in names for key in (name, f"{name} with Keras") if key in checks]


def judge_keras(name: str, told: Mapping[str, Any]) -> Check:
    """The check of Keras on a backend that works."""
    asked = "Keras has every attribute that unidist replaces in it"
    label = f"Keras on {name}"
    if "error" in told:
        advice = "see the error: another Keras, or another KERAS_BACKEND"
        return Check(name=label, asked=asked, status="failed", found=told["error"], advice=advice)
    if lost := told.get("lost"):
        advice = "install a version that unidist was tested with; models that need it are refused until then"
        return Check(name=label, asked=asked, status="failed", found="; ".join(lost), advice=advice)
    return Check(
        name=label, asked=asked, status="ok", found=f"{told['replaced']} are replaced, and put back at the end"
    )


def judge(name: str, told: Mapping[str, Any], cards: int) -> Check:
    """The check of a backend that is installed."""
    if "error" in told:
        hint = registry.entry(name).hint or "see the error"
        return Check(name=_name(name), asked=_ASKED, status="failed", found=told["error"], advice=hint)
    devices: Sequence[str] = told["devices"]
    kinds = Counter(device.partition(":")[0] for device in devices)
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if cards and registry.entry(name).accelerators and set(kinds) == {"cpu"}:
        return Check(
            name=_name(name),
            asked="it sees this machine's accelerators",
            status="warning",
            found=f"{found}, but the machine has {counted(cards, 'NVIDIA card')}",
            advice=use_cards(name),
        )
    return Check(name=_name(name), asked=_ASKED, status="ok", found=found)


def use_cards(name: str) -> str:
    """Returns what to do where a backend does not see the machine's cards."""
    return f"unset CUDA_VISIBLE_DEVICES (or name cards in it), or install a build of {name} for CUDA"


def count_cards(folder: Path = Path("/dev")) -> int:
    """NVIDIA cards that this machine, or its container, has."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in folder.glob("nvidia*"))


def ask_a_process(name: str, seconds: float = SECONDS) -> Mapping[str, Any]:
    """Returns what `unidist.keras.backend_probe` says of a backend, or why it says nothing."""
    # Outside every world: a launcher above this command has not started the probe.
    environ = {key: value for key, value in without_launcher(os.environ).items() if not key.startswith("SLURM_")}
    environ.pop("UNIDIST_BACKEND", None)
    command = [sys.executable, "-m", "unidist.keras.backend_probe", name]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"importing it and finding its devices took longer than {seconds:g} s"}
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        words = done.stderr.strip().rpartition("\n")[2]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return {"error": f"the process that imported it ended with {how}: {words}"}
    told: Mapping[str, Any] = json.loads(last)
    return told


def _name(backend: str) -> str:
    return f"backend {backend}"

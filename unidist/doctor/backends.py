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
from unidist.doctor.check import Check, Question, counted
from unidist.errors import BackendNotAvailableError

Ask: TypeAlias = Callable[[str], Mapping[str, Any]]

# A framework's imports take a minute from a cold network disk.
SECONDS = 180.0
_AT_ONCE = 2


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
            checks[name] = _question(name).not_checked("not installed", f"to have it: {error}")
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
    question = Question(f"Keras on {name}", "Keras has every attribute that unidist replaces in it")
    if "error" in told:
        return question.failed(told["error"], "see the error: another Keras, or another KERAS_BACKEND")
    if lost := told.get("lost"):
        advice = "install a version that unidist was tested with; models that need it are refused until then"
        return question.failed("; ".join(lost), advice)
    return question.ok(f"{told['replaced']} are replaced, and put back at the end")


def judge(name: str, told: Mapping[str, Any], cards: int) -> Check:
    """The check of a backend that is installed."""
    if "error" in told:
        return _question(name).failed(told["error"], registry.entry(name).hint or "see the error")
    return judge_devices(_question(name), name, told["devices"], cards)


def judge_devices(question: Question, name: str, devices: Sequence[str], cards: int) -> Check:
    """The check of a backend's devices, where the machine has so many NVIDIA cards."""
    kinds = Counter(device.partition(":")[0] for device in devices)
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if cards and registry.entry(name).accelerators and set(kinds) == {"cpu"}:
        advice = f"unset CUDA_VISIBLE_DEVICES (or name cards in it), or install a build of {name} for CUDA"
        return question.warning(f"{found}, but this machine has {counted(cards, 'NVIDIA card')}", advice)
    return question.ok(found)


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


def _question(backend: str) -> Question:
    return Question(
        f"backend {backend}", "its adapter can be imported and finds its devices, accelerators where there are any"
    )

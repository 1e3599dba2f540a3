"""The worlds that the parity suite trains in: processes that start once and train case after case."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import preloaded
from tests.parity.train import Result, Spec, start
from tests.visible import OF_KERAS
from unidist.testing.processes import Outcome, ProcessWorld, Target

ROOT = Path(__file__).parents[2]

DATA_4 = Spec("data", (("data", 4),))
MODEL_4 = Spec("model", (("model", 4),))
GRID = Spec("model", (("data", 2), ("model", 2)))
DATA_2 = Spec("data", (("data", 2),))
MODEL_2 = Spec("model", (("model", 2),))


@dataclass(frozen=True)
class Setting:
    """A backend on a number of processes and devices.

    Attributes:
        keras: the Keras backend; its one-device training is what the results are compared with.
        backend: unidist's name; None: Keras alone on one device.
        devices: virtual devices in each process, where the backend has them.
        specs: the strategies that fit.
        environment: of the processes, beside what the Keras backend needs.
        preload: what they find imported; () for what all of the Keras backend do.
    """

    name: str
    keras: str
    backend: str | None = None
    processes: int = 1
    devices: int | None = None
    launcher: str | None = None
    specs: tuple[Spec, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()

    def world(self, kind: type[ProcessWorld] = ProcessWorld) -> ProcessWorld:
        env = {"CUDA_VISIBLE_DEVICES": "", **OF_KERAS[self.keras], **dict(self.environment)}
        return kind(
            self.processes,
            launcher=self.launcher,
            env=env,
            setup=start,
            setup_args=(self.backend, self.devices),
            timeout=240.0,
            preload=self.preload or preloaded.KERAS[self.keras],
            debugger=True,
        )


ALONE = {keras: Setting(f"{keras}-alone", keras) for keras in ("torch", "jax", "tensorflow")}
FOUR = (DATA_4, MODEL_4, GRID)
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("sim-torch", "torch", "sim", devices=4, specs=FOUR),
        Setting("sim-jax", "jax", "sim", devices=4, specs=FOUR),
        Setting("sim-jax-8", "jax", "sim", devices=8),
        Setting("torch-1", "torch", "torch"),
        Setting("torch-2", "torch", "torch", 2, launcher="torchrun", specs=(DATA_2, MODEL_2)),
        Setting("torch-3", "torch", "torch", 3, launcher="torchrun"),
        Setting("torch-4", "torch", "torch", 4, launcher="torchrun", specs=FOUR),
        Setting("horovod-2", "torch", "horovod", 2, launcher="torchrun", specs=(DATA_2, MODEL_2)),
        Setting("horovod-3", "torch", "horovod", 3, launcher="torchrun"),
        Setting("horovod-4", "torch", "horovod", 4, launcher="torchrun", specs=FOUR),
        Setting(
            *("horovod-2-tensorflow", "tensorflow", "horovod", 2),
            launcher="torchrun",
            specs=(DATA_2,),
            # Milliseconds: TensorFlow traces for long, while Horovod's threads agree that there is nothing to do.
            environment=(("HOROVOD_CYCLE_TIME", "20"),),
        ),
        Setting("jax-4", "jax", "jax", devices=4, specs=FOUR),
        Setting("sim-tensorflow", "tensorflow", "sim", devices=4, specs=FOUR),
        Setting("tensorflow-4", "tensorflow", "tensorflow", devices=4, specs=FOUR),
        Setting("tensorflow-2x2", "tensorflow", "tensorflow", 2, devices=2, launcher="torchrun", specs=FOUR),
        Setting("jax-2x2", "jax", "jax", 2, devices=2, launcher="jax", specs=FOUR),
    )
}


class Reference(ProcessWorld):
    """A plain Keras program on one device: where the framework hangs, it is started once more, with a warning."""

    def outcomes(self, target: Target, *args: Any, **kwargs: Any) -> dict[int, Outcome]:
        found = super().outcomes(target, *args, **kwargs)
        failures = [one.failure for one in found.values() if one.failure is not None]
        if not any(failure.kind == "timeout" for failure in failures):
            return found
        warnings.warn(f"A reference hung and is started again: {failures[0]}", stacklevel=2)
        return super().outcomes(target, *args, **kwargs)


class Alone:
    """What plain Keras does on one device; each program is run once."""

    def __init__(self) -> None:
        self._worlds: dict[str, ProcessWorld] = {}
        self._results: dict[Any, Any] = {}

    def world(self, keras: str) -> ProcessWorld:
        if keras not in self._worlds:
            self._worlds[keras] = ALONE[keras].world(Reference)
        return self._worlds[keras]

    def run(self, keras: str, program: Target, *args: Any, **options: Any) -> Any:
        """What a program gives."""
        key = (keras, program, args, *sorted(options.items()))
        if key not in self._results:
            self._results[key] = self.world(keras).call(program, *args, **options)[0]
        return self._results[key]

    def train(self, keras: str, case: str, **options: Any) -> Result:
        found: Result = self.run(keras, "tests.parity.train:train", case, None, **options)
        return found

    def close(self) -> None:
        for world in self._worlds.values():
            world.close(patience=1.0)


class Worlds:
    """The settings' worlds. Those not used for longest are ended where more than `limit` processes would run.

    Horovod's are ended when another is asked for, and at the end of a file: their processes agree every millisecond
    that there is nothing to do, which takes half of two cores.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[str, ProcessWorld] = {}
        self._results: dict[Any, list[Result]] = {}

    def get(self, name: str) -> ProcessWorld:
        self.end_horovods(but=name)
        world = self._open.pop(name, None) or SETTINGS[name].world()
        while self._open and world.count + sum(other.count for other in self._open.values()) > self._limit:
            self._open.pop(next(iter(self._open))).close(patience=1.0)
        self._open[name] = world
        return world

    def end_horovods(self, but: str | None = None) -> None:
        for name in [n for n in self._open if n != but and SETTINGS[n].backend == "horovod"]:
            self._open.pop(name).close(patience=1.0)

    def train(self, name: str, case: str, spec: Spec, **options: Any) -> list[Result]:
        """Each process's result. Done once for the same arguments."""
        key = (name, case, spec, *sorted(options.items()))
        if key not in self._results:
            self._results[key] = self.get(name).call("tests.parity.train:train", case, spec, **options)
        return self._results[key]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close(patience=1.0)

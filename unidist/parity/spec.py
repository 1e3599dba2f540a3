"""Describes one run of a comparison: which backend, which devices, which function."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from unidist.backends import registry
from unidist.errors import UnidistError


class ParityError(UnidistError, ValueError):
    """A comparison that cannot be made; the text says what is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One run.

    Attributes:
        target: "path/of/file.py:function".
        backend: the name for `unidist.use`; None: plain Keras on one device, the reference.
        keras: the Keras backend.
        mesh: axes and sizes; empty for the reference.
        steps: training steps to compare, after which the run ends.
        initial: file with the weights to begin with; None: the function's own, which are written there.
        folder: where results go.
    """

    target: str
    backend: str | None
    keras: str
    mesh: dict[str, int]
    steps: int
    initial: str | None
    folder: str

    @property
    def size(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def name(self) -> str:
        if self.backend is None:
            return f"one device ({self.keras})"
        return self.backend if _keras_of(self.backend) == self.keras else f"{self.backend}:{self.keras}"

    @property
    def by_processes(self) -> bool:
        """Is true where each device is a process; else one process has them all."""
        return self.backend is not None and registry.entry(self.backend).one_device

    def write(self) -> Path:
        path = Path(self.folder) / "spec.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str) -> Spec:
        return cls(**json.loads(Path(path).read_text()))


def parse_backends(text: str) -> list[tuple[str, str]]:
    """(backend, Keras backend) of "sim,torch,sim:jax"."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, keras = part.partition(":")
        if not (keras := keras or _keras_of(name)):
            raise ParityError(f"backend {name!r}: say on which Keras backend it runs, as {name}:torch")
        found.append((name, keras))
    if not found:
        raise ParityError(f"--backends {text!r} names none: write for instance sim,torch,jax")
    return found


def _keras_of(backend: str) -> str:
    """The Keras backend that an adapter serves best; "" where it does not say."""
    return next(iter(registry.entry(backend).keras_backends), "")


def check_target(target: str) -> None:
    """Raises ParityError where it is not FILE.py:function of a file that exists."""
    file, _, function = target.rpartition(":")
    if not file or not function.isidentifier():
        raise ParityError(f"{target!r}: write FILE.py:function, the function that trains")
    if not Path(file).is_file():
        raise ParityError(f"{target!r}: no such file: {file!r} (looked from {Path.cwd()})")
